"""`bench federation`: what devices' updates cost to aggregate, to mask and to simulate, and what a cohort is worth."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.federation import aggregate, learning, secure_aggregation, simulation, upload_size
from bench.result import Measured, commit
from bench.runner import JsonFile, Keep, Only, Quick, run_parts


def federation(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Aggregate, mask, simulate, and train a cohort of the real model, with and without privacy."""
    with tempfile.TemporaryDirectory() as name:
        place = keep or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Callable[[bool], Measured]] = {
            "aggregate": aggregate.measure,
            "bytes": upload_size.measure,
            "masking": secure_aggregation.measure,
            "simulate": simulation.measure,
            # The cohort without privacy is the same for both parts and is trained once.
            "warm-start": partial(learning.warm_start, place=place),
            "privacy": partial(learning.privacy, place=place),
        }
        kept = {part: partial(_kept, place, part, measure) for part, measure in parts.items()}
        run_parts(kept, json_file, quick, only)


def _kept(place: Path, part: str, measure: Callable[[bool], Measured], quick: bool) -> Measured:
    """Measures a part unless its figures are in `place` already."""
    path = place / f"{part}{'.quick' if quick else ''}.json"
    if not path.exists():
        rows, claims = measure(quick)
        path.write_text(json.dumps([[{"commit": commit(), **row} for row in rows], claims]))
    rows, claims = json.loads(path.read_text())
    return rows, claims
