"""Lays out the versions of an adapter as a drawing: each has a row, and a line to the version that it was trained from.

Lines of descent that branch get lanes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.protocol import AdapterVersion

ROW, LANE, MARGIN = 34, 26, 18  # pixels


@dataclass(frozen=True)
class Node:
    """A version in the drawing; x and y in pixels."""

    version: AdapterVersion
    x: int
    y: int
    description: str


@dataclass(frozen=True)
class Lineage:
    """A drawing: nodes, and the paths of the lines between them, in SVG's notation."""

    nodes: list[Node]
    lines: list[str]
    width: int
    height: int
    summary: str


def lineage(versions: Sequence[AdapterVersion], main: int | None) -> Lineage:
    """Draws versions of one adapter, newest first. A version whose parent has a later child already gets a new lane."""
    lanes: dict[int, int] = {}
    children: dict[int, int] = {}  # the lane in which the line of a version goes on
    for version in sorted(versions, key=lambda each: each.version):
        parent = version.parent
        before = None if parent is None or parent.adapter != version.adapter else parent.version
        if before in lanes and before not in children:
            lanes[version.version] = children[before] = lanes[before]
        else:
            lanes[version.version] = max(lanes.values(), default=-1) + 1 if lanes else 0
    rows = {version.version: number for number, version in enumerate(versions)}
    nodes, lines = [], []
    for version in versions:
        x, y = MARGIN + LANE * lanes[version.version], MARGIN + ROW * rows[version.version]
        nodes.append(Node(version, x, y, _description(version, main)))
        parent = version.parent
        if parent is not None and parent.adapter == version.adapter and parent.version in rows:
            end_x, end_y = MARGIN + LANE * lanes[parent.version], MARGIN + ROW * rows[parent.version]
            middle = (y + end_y) // 2
            lines.append(f"M{x} {y} C{x} {middle} {end_x} {middle} {end_x} {end_y}")
    width = 2 * MARGIN + LANE * max(lanes.values(), default=0)
    summary = "; ".join(f"version {node.version.version}: {node.description}" for node in nodes)
    return Lineage(nodes, lines, width, 2 * MARGIN + ROW * max(len(versions) - 1, 0), summary)


def _description(version: AdapterVersion, main: int | None) -> str:
    facts = ["main"] if version.version == main else []
    if version.parent is None:
        facts.append("from the base model")
    elif version.parent.adapter == version.adapter:
        facts.append(f"from version {version.parent.version}")
    else:
        facts.append(f"from {version.parent.adapter} version {version.parent.version}")
    return ", ".join([str(version.state), *facts])
