"""What a simulation says of itself: JSON for machines, Markdown and HTML for people. Plots are `simulation.plots`'s.

Knows what came out, not how it came about.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shared.masking.messages import SEALED_BYTES
from shared.masking.shamir import SHARE_BYTES
from simulation.records import Round
from simulation.session import Simulated

COLUMNS = ("round", "version", "asked", "dropped", "refused", "counted", "clipped", "accuracy", "loss", "devices")
Cell = str | int


def document(found: Simulated) -> dict[str, Any]:
    """All of it as JSON. digest: sha256 of all but the seconds."""
    return {
        "digest": found.digest,
        "settings": found.settings.model_dump(mode="json"),
        "recipe_id": found.manifest.recipe_id,
        "size_d": found.manifest.size,
        "examples": {device: len(shard.train) for device, shard in enumerate(found.shards)},
        "bytes_sent": sent(found),
        "rounds": [each.model_dump(mode="json") for each in found.rounds],
    }


def spread(told: Round) -> tuple[float, float, float]:
    """(10th percentile, median, 90th) of the devices' accuracies."""
    values = sorted(told.devices.values())
    last = len(values) - 1
    return values[round(last * 0.1)], median(values), values[round(last * 0.9)]


def rows(found: Simulated) -> list[tuple[Cell, ...]]:
    """One for each round, as COLUMNS says; devices: 10th percentile, median and 90th of their own accuracies."""
    return [
        (
            told.number,
            "yes" if told.published else "no",
            told.asked,
            told.dropped,
            sum(told.refused.values()),
            told.counted,
            told.clipped,
            f"{told.accuracy:.1%}",
            f"{told.loss:.3f}",
            " / ".join(f"{value:.0%}" for value in spread(told)),
        )
        for told in found.rounds
    ]


def facts(found: Simulated) -> list[tuple[str, str]]:
    """What it was, in words."""
    settings, cohort, last = found.settings, found.settings.cohort, found.rounds[-1]
    faults = settings.faults
    said = [
        ("devices", f"{settings.devices}, {settings.asked} asked in a round"),
        ("base, task", f"{settings.base}, {cohort.task if isinstance(cohort.task, str) else cohort.task.name}"),
        ("D", f"{found.manifest.size:,} numbers of LoRA-B"),
        ("data", _partition(found)),
        ("algorithm", f"{cohort.algorithm.name}, {cohort.aggregator.name}, server {cohort.optimizer.name}"),
        ("local work", f"{cohort.training.steps} steps at lr {cohort.training.lr:g}"),
        ("upload", cohort.upload),
        ("drop-outs", f"{faults.dropout:.0%}"),
        ("poisoned", f"{faults.poisoned:.0%}, {faults.attack}" if faults.poisoned else "none"),
        ("accuracy", f"{found.rounds[0].accuracy:.1%} before, {last.accuracy:.1%} after {last.number} rounds"),
        ("bytes a device sends", _bytes(found)),
    ]
    said += [(f"epsilon of {name}", f"{value:.3g}") for name, value in last.epsilon.items()]
    return [*said, ("seed", str(settings.seed)), ("digest", found.digest)]


def _partition(found: Simulated) -> str:
    data, sizes = found.settings.data, [len(shard.train) for shard in found.shards]
    how = f"dirichlet, alpha {data.alpha:g}" if data.partition == "dirichlet" else data.partition
    return f"{how}; {min(sizes)} to {max(sizes)} examples a device, {sum(sizes):,} in all"


def sent(found: Simulated) -> dict[str, float]:
    """Bytes that a device sends in a round, by form; empty where nobody sent any.

    What was not masked is told as a masked round of as many devices would have it: a vector of 32-bit numbers, and for
    each other device sealed shares and one that unmasks, without what the messages around them take.
    """
    told = next((each for each in reversed(found.rounds) if each.bytes.weights), None)
    if told is None:
        return {}
    masked = told.bytes.masked or 4 * (found.manifest.size + 1) + told.asked * (SEALED_BYTES + SHARE_BYTES)
    name = "masked" if told.bytes.masked else "masked (computed)"
    return {"LoRA-B": told.bytes.weights, "trajectory": told.bytes.trajectory, name: masked}


def _bytes(found: Simulated) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in sent(found).items()) or "none"


def markdown(found: Simulated, plots: Sequence[str]) -> str:
    """The report, with links to plots that lie beside it."""
    lines = ["# Simulation", "", *(f"- **{name}**: {value}" for name, value in facts(found)), ""]
    lines += [f"![{Path(name).stem}]({name})" for name in plots]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows(found)]
    lines += ["", *(f"- {line}" for line in remarks(found))]
    return "\n".join(lines).rstrip() + "\n"


def remarks(found: Simulated) -> list[str]:
    """Rounds without a version, and updates that were refused."""
    said = [f"round {told.number}: no version; {told.why}" for told in found.rounds[1:] if not told.published]
    refused: dict[str, int] = {}
    for told in found.rounds:
        for why, count in told.refused.items():
            refused[why] = refused.get(why, 0) + count
    return said + [f"{count} updates refused: {why}" for why, count in refused.items()]


def page(found: Simulated, plots: Sequence[str]) -> str:
    """The report as a page of its own; it loads nothing but plots that lie beside it."""
    said = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts(found))
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows(found)
    )
    shown = "".join(f'<img src="{name}" alt="{Path(name).stem}">' for name in plots)
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(found))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Simulation</title><style>'
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dt{font-weight:600}dd{margin:0;"
        "overflow-wrap:anywhere}img{max-width:100%}table{border-collapse:collapse}td,th{padding:.2rem .6rem;"
        "border-bottom:1px solid #ccc;text-align:right}"
        "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}}"
        f"</style><h1>Simulation</h1><dl>{said}</dl>{shown}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        f"</table><ul>{notes}</ul></html>\n"
    )


def write(found: Simulated, directory: Path, plots: Sequence[str]) -> None:
    """report.json, report.md and report.html."""
    (directory / "report.json").write_text(json.dumps(document(found), indent=1) + "\n", encoding="utf-8")
    (directory / "report.md").write_text(markdown(found, plots), encoding="utf-8")
    (directory / "report.html").write_text(page(found, plots), encoding="utf-8")
