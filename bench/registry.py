"""`bench registry`: how fast adapters are published, downloaded, put to use, and their histories verified.

Publishing: bench.registry_publish. Downloads: bench.registry_downloads. Scoring with many adapters in one batch:
bench.registry_scoring. Replay of a trajectory: bench.registry_replay. Each measures for itself and names its claims.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import registry_downloads, registry_publish, registry_replay, registry_scoring
from bench.result import write
from bench.step import notes, show

Row = dict[str, Any]


class Part(StrEnum):
    """What may be measured alone."""

    PUBLISH = "publish"
    DOWNLOADS = "downloads"
    SCORING = "scoring"
    REPLAY = "replay"


MEASURES: dict[Part, Callable[[bool], tuple[list[Row], dict[str, float]]]] = {
    Part.PUBLISH: registry_publish.measure,
    Part.DOWNLOADS: registry_downloads.measure,
    Part.SCORING: registry_scoring.measure,
    Part.REPLAY: registry_replay.measure,
}


def registry(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer and smaller of everything")] = False,
    only: Annotated[list[Part] | None, typer.Option("--only", help="these parts; default: all")] = None,
) -> None:
    """Publish, download, score and replay adapters."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    for part in only or list(Part):
        notes.print(part)
        found, said = MEASURES[part](quick)
        rows += [{"part": part, **row} for row in found]
        claims |= said
    show(claims)
    write(json_file, rows, claims)
