"""`bench strangers`: `mobizo quickstart` with its defaults on six files for which no setting was chosen.

Each run is the command as a person types it, with a home of its own: a server and a device start, the program is
compiled, and the adapter is trained. bench/data/strangers/README.md says where the files are from. `base` is the
file of --base, or the one of `make setup`; `seconds` is the time of the whole command. `over_baseline` is the accuracy
minus the one of a logistic regression on n-grams, in points; both are of the same test records. A seed splits the
records and trains; rows are means over a file's seeds.
"""

import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.programs import model_file
from bench.result import Row, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, rows_of_seeds, select_parts
from mobizo.quickstart.processes import BIN

FILES = Path(__file__).resolve().parent / "data" / "strangers"
QUICK_LINES = 121  # of the file


@dataclass(frozen=True)
class File:
    """A file of records as its owner has it.

    classes: 0 for texts that a model learns to write. columns: for --map. seeds: more than one where the difference to
    the n-grams is smaller than what one split can show.
    """

    name: str
    language: str
    records: int
    classes: int
    columns: tuple[str, ...] = ()
    seeds: int = 1

    @property
    def path(self) -> Path:
        return FILES / self.name


SETS = {
    "packages": File("pakete.csv", "German", 795, 10, ("text=Beschreibung", "label=Bereich")),
    "programs": File("programas.tsv", "Spanish", 759, 2, seeds=5),
    "definitions": File("definitions.csv", "English", 880, 16, ("text=definition", "label=topic")),
    "changes": File("changes.csv", "English", 818, 7, ("text=note", "label=component")),
    "manuals": File("manuels.jsonl", "French", 461, 5),
    "chats": File("chats.jsonl", "English", 633, 0),
}


def strangers(
    json_file: JsonFile = None,
    quick: Quick = False,
    only: Only = None,
    keep: Keep = None,
    base: Annotated[Path | None, typer.Option(help="GGUF file of another base.")] = None,
) -> None:
    """Personalize with the defaults of `mobizo quickstart` on files for which no setting was chosen."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = keep or Path(name)
        for part in select_parts(SETS, only):
            rows.append(_mean_row(part, quick, base or model_file(), directory))
    write(json_file, rows, {})


def _mean_row(part: str, quick: bool, base: Path, directory: Path) -> Row:
    """Runs the command once for each seed. directory: of rows that were measured before."""
    file = SETS[part]
    rows = rows_of_seeds(directory / part, quick, partial(_run, file, base), range(file.seeds))
    row = {name: statistics.mean(row[name] for row in rows) for name in rows[0]} | {"seeds": len(rows)}
    return {"set": part, "base": base.stem, "language": file.language, "classes": file.classes, **row}


def _run(file: File, base: Path, seed: int, quick: bool) -> Row:
    """Runs the command once, in a directory of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = file.path
        if quick:  # in these files every record is one line
            path = Path(name) / file.name
            path.write_bytes(b"".join(file.path.read_bytes().splitlines(keepends=True)[:QUICK_LINES]))
        options = [f"--map={column}" for column in file.columns]
        command = [BIN / "mobizo", "quickstart", "--base", base, "--data", path, f"--seed={seed}", *options]
        start = time.monotonic()
        process = subprocess.run(
            [*map(str, command), "--home", f"{name}/home", "--json"], stdout=subprocess.PIPE, text=True, check=False
        )
        seconds = time.monotonic() - start
    if process.returncode:
        notes.print(f"{file.name}: quickstart ended with exit status {process.returncode}")
        raise typer.Exit(1)
    return _row(json.loads(process.stdout), seconds)


def _row(report: dict[str, Any], seconds: float) -> Row:
    """Returns what a report of quickstart says. seconds: of the command."""
    common = {name: report[name] for name in ("records", "records_cut", "steps", "train_seconds")}
    common["seconds"] = seconds
    if report["perplexity"] is not None:
        before, after = report["perplexity"]
        return {"perplexity_before": before, "perplexity_after": after, **common}
    accuracy, baseline = report["accuracy_after"], report["baseline_accuracy"]
    return {
        "accuracy_before": report["accuracy_before"],
        "accuracy": accuracy,
        "tested": report["accuracy_interval"][0],  # records
        "baseline": baseline,
        "majority": report["majority_accuracy"],
        "over_baseline": 100 * (accuracy - baseline),
        **common,
    }
