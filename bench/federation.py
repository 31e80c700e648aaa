"""`bench federation`: what many devices' updates cost to aggregate, to hide and to simulate, and what they are worth.

Aggregation: bench.federation_aggregate. Bytes by upload form: bench.federation_bytes. Masked sums:
bench.federation_masking. Simulation: bench.federation_simulation. What a cohort is worth to a new user, and what
privacy costs it, on SmolLM2-135M: bench.federation_learning. Each measures for itself and names its claims.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.result import commit, write
from bench.step import notes, show

Row = dict[str, Any]


class Part(StrEnum):
    """What may be measured alone."""

    AGGREGATE = "aggregate"
    BYTES = "bytes"
    MASKING = "masking"
    SIMULATE = "simulate"
    WARM_START = "warm-start"
    PRIVACY = "privacy"


# Where each is, imported when it is its turn: one needs a compiler, another cryptography alone.
HOMES: dict[Part, tuple[str, str]] = {
    Part.AGGREGATE: ("federation_aggregate", "measure"),
    Part.BYTES: ("federation_bytes", "measure"),
    Part.MASKING: ("federation_masking", "measure"),
    Part.SIMULATE: ("federation_simulation", "measure"),
    Part.WARM_START: ("federation_learning", "warm_start"),
    Part.PRIVACY: ("federation_learning", "privacy"),
}
KEEPING = (Part.WARM_START, Part.PRIVACY)


def federation(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer uploads, devices, rounds and steps")] = False,
    only: Annotated[list[Part] | None, typer.Option("--only", help="these parts; default: all")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="keep programs, rounds and what was measured here; go on with what is there"),
    ] = None,
) -> None:
    """Aggregate, mask, simulate, and train a cohort of the real model, with and without privacy."""
    rows: list[Row] = []
    claims: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        place = keep or Path(name)
        for part in only or list(Part):
            notes.print(part)
            kept = place / f"{part}{'.quick' if quick else ''}.json"
            if not kept.exists():
                place.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(_measured(part, quick, place)))
            found = json.loads(kept.read_text())
            rows += [{"part": part, **row} for row in found["rows"]]
            claims |= found["claims"]
    show(claims)
    write(json_file, rows, claims)


def _measured(part: Part, quick: bool, place: Path) -> dict[str, Any]:
    module, function = HOMES[part]
    measure: Callable[..., tuple[list[Row], dict[str, float]]] = getattr(import_module(f"bench.{module}"), function)
    # The cohort without privacy is the same for both of them: it is trained once.
    rows, claims = measure(quick, place) if part in KEEPING else measure(quick)
    return {"rows": [{"commit": commit(), **row} for row in rows], "claims": claims}
