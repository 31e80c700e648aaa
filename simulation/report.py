"""The report of a simulation as JSON and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from shared.federation.secure_aggregation.messages import SEALED_BYTES
from shared.federation.secure_aggregation.shamir import SHARE_BYTES
from simulation.records import RoundRecord
from simulation.session import SimulationOutcome

COLUMNS = ("round", "version", "selected", "dropped", "refused", "counted", "clipped", "accuracy", "loss", "devices")
Cell = str | int


def document(outcome: SimulationOutcome) -> dict[str, Any]:
    """Returns the report as JSON. digest: sha256 of everything except times."""
    return {
        "digest": outcome.digest,
        "settings": outcome.settings.model_dump(mode="json"),
        "recipe_id": outcome.manifest.recipe_id,
        "size_d": outcome.manifest.size,
        "examples": {device: len(shard.train) for device, shard in enumerate(outcome.shards)},
        "bytes_sent": bytes_sent(outcome),
        "rounds": [record.model_dump(mode="json") for record in outcome.rounds],
    }


def accuracy_percentiles(record: RoundRecord) -> tuple[float, float, float]:
    """Returns the 10th percentile, the median and the 90th percentile of the devices' accuracies."""
    values = sorted(record.devices.values())
    last = len(values) - 1
    return values[round(last * 0.1)], median(values), values[round(last * 0.9)]


def rows(outcome: SimulationOutcome) -> list[tuple[Cell, ...]]:
    """Returns one row per round with COLUMNS. devices: 10th percentile, median and 90th percentile of accuracies."""
    return [
        (
            record.number,
            "yes" if record.published else "no",
            record.selected,
            record.dropped,
            sum(record.refused.values()),
            record.counted,
            record.clipped,
            f"{record.accuracy:.1%}",
            f"{record.loss:.3f}",
            " / ".join(f"{value:.0%}" for value in accuracy_percentiles(record)),
        )
        for record in outcome.rounds
    ]


def facts(outcome: SimulationOutcome) -> list[tuple[str, str]]:
    """Returns the main settings and results as (name, text)."""
    settings, cohort, last = outcome.settings, outcome.settings.cohort, outcome.rounds[-1]
    faults = settings.faults
    items = [
        ("devices", f"{settings.devices}, {settings.devices_per_round} selected per round"),
        ("base, task", f"{settings.base}, {cohort.task if isinstance(cohort.task, str) else cohort.task.name}"),
        ("D", f"{outcome.manifest.size:,} numbers of LoRA-B"),
        ("data", _partition(outcome)),
        ("algorithm", f"{cohort.algorithm.name}, {cohort.aggregator.name}, server {cohort.optimizer.name}"),
        ("local work", f"{cohort.training.steps} steps at lr {cohort.training.lr:g}"),
        ("upload", cohort.upload),
        ("drop-outs", f"{faults.dropout:.0%}"),
        ("poisoned", f"{faults.poisoned:.0%}, {faults.attack}" if faults.poisoned else "none"),
        ("accuracy", f"{outcome.rounds[0].accuracy:.1%} before, {last.accuracy:.1%} after {last.number} rounds"),
        ("bytes sent per device", _bytes(outcome)),
    ]
    items += [(f"epsilon of {name}", f"{value:.3g}") for name, value in last.epsilon.items()]
    return [*items, ("seed", str(settings.seed)), ("digest", outcome.digest)]


def _partition(outcome: SimulationOutcome) -> str:
    data, sizes = outcome.settings.data, [len(shard.train) for shard in outcome.shards]
    description = f"dirichlet, alpha {data.alpha:g}" if data.partition == "dirichlet" else data.partition
    return f"{description}; {min(sizes)} to {max(sizes)} examples per device, {sum(sizes):,} in total"


def bytes_sent(outcome: SimulationOutcome) -> dict[str, float]:
    """Returns the bytes that a device sends in a round, by form of upload; empty if no device sent any.

    If the cohort is not masked, the bytes of a masked round with as many devices are computed: a vector of 32-bit
    numbers, and for each other device sealed shares and one unmasking share, without the overhead of the messages.
    """
    record = next((candidate for candidate in reversed(outcome.rounds) if candidate.bytes.weights), None)
    if record is None:
        return {}
    masked = record.bytes.masked or 4 * (outcome.manifest.size + 1) + record.selected * (SEALED_BYTES + SHARE_BYTES)
    name = "masked" if record.bytes.masked else "masked (computed)"
    return {"LoRA-B": record.bytes.weights, "trajectory": record.bytes.trajectory, name: masked}


def _bytes(outcome: SimulationOutcome) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in bytes_sent(outcome).items()) or "none"


def markdown(outcome: SimulationOutcome) -> str:
    """Returns the report as Markdown."""
    lines = ["# Simulation", "", *(f"- **{name}**: {value}" for name, value in facts(outcome)), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows(outcome)]
    lines += ["", *(f"- {line}" for line in remarks(outcome))]
    return "\n".join(lines).rstrip() + "\n"


def remarks(outcome: SimulationOutcome) -> list[str]:
    """Returns remarks on rounds without a version and on rejected updates."""
    items = [
        f"round {record.number}: no version; {record.why}" for record in outcome.rounds[1:] if not record.published
    ]
    rejections: dict[str, int] = {}
    for record in outcome.rounds:
        for reason, count in record.refused.items():
            rejections[reason] = rejections.get(reason, 0) + count
    return items + [f"{count} updates rejected: {reason}" for reason, count in rejections.items()]


def write(outcome: SimulationOutcome, directory: Path) -> None:
    """Writes report.json and report.md."""
    (directory / "report.json").write_text(json.dumps(document(outcome), indent=1) + "\n", encoding="utf-8")
    (directory / "report.md").write_text(markdown(outcome), encoding="utf-8")
