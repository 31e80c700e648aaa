"""`mobizo-server calibrate`: makes a calibration file. Knows options and how to print; a home only by its bases."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from server.compile_cli import Json, complaints, layers_of, output, quiet_libraries, settings_of
from shared.calibration import Kind
from shared.errors import InvalidTask
from shared.task import Task
from shared.tasks import named_task


def calibrate(
    base: Annotated[
        str, typer.Option(help="a registered base's name, a Hugging Face directory or id, or a .gguf file")
    ],
    task: Annotated[str, typer.Option(help="a shipped task's name, or a .json file of a task")],
    data: Annotated[
        Path, typer.Option(help="JSONL of records that are nobody's: what a device learns is not among them")
    ],
    out: Annotated[Path, typer.Option(help="the calibration's file")],
    kind: Annotated[str, typer.Option(help="gradients or activations")] = "gradients",
    targets: Annotated[str, typer.Option(help="linear layers, with commas")] = "q_proj,v_proj",
    layers: Annotated[str, typer.Option(help="decoder layers: all, last:K, last:P%, or 0,1,...")] = "all",
    width: Annotated[int, typer.Option(min=1, max=256, help="directions for each; the largest rank it serves")] = 16,
    examples: Annotated[int, typer.Option(min=1, help="at most so many records")] = 200,
    loss: Annotated[str, typer.Option(help="of gradients: full or candidates")] = "full",
    sequence_length: Annotated[int, typer.Option("--seq-len", help="most tokens per example")] = 64,
    answer_length: Annotated[
        int | None, typer.Option(help="most tokens per answer, where answers depend on the record")
    ] = None,
    choices: Annotated[int | None, typer.Option(help="most answers of an example, where they do")] = None,
    as_json: Json = False,
) -> None:
    """Make a calibration: for each linear layer the input directions that matter most, from which recipes take A."""
    began = time.monotonic()
    settings = settings_of(
        {
            "rank": width,
            "targets": tuple(target.strip() for target in targets.split(",")),
            "layers": layers_of(layers),
            "loss": loss,
            "sequence_length": sequence_length,
            "answer_length": answer_length,
            "choices": choices,
        }
    )
    if kind not in get_args(Kind):
        complaints.print(f"error: --kind: say {' or '.join(get_args(Kind))}", style="red", markup=False)
        raise typer.Exit(2)
    with quiet_libraries(), _bar() as progress:
        from server.local_calibration import calibrate_from

        made = calibrate_from(*_source(base), settings, cast(Kind, kind), _task(task), data, examples, out, progress)
    figures = {
        "sha256": made.sha256,
        "base": made.about.base.name,
        "base_sha256": made.about.base.sha256,
        "kind": made.about.kind,
        "task": made.about.task,
        "examples": made.about.examples,
        "modules": len(made.directions),
        "width": made.width,
        "bytes": out.stat().st_size,
        "seconds": round(time.monotonic() - began, 1),
    }
    _tell(as_json, figures)


def _tell(as_json: bool, figures: dict[str, Any]) -> None:
    if as_json:
        output.print(json.dumps(figures), markup=False)
        return
    for name, value in figures.items():
        output.print(f"{name}: {value:,}" if type(value) is int else f"{name}: {value}", markup=False)


def _task(name: str) -> Task:
    path = Path(name)
    if path.suffix != ".json":
        return named_task(name)
    try:
        return Task.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidTask(f"{path}: the task cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InvalidTask(f"{path}: no task ({str(error).splitlines()[0]})") from error


def _source(base: str) -> tuple[str, str | None]:
    """Where the base lies, and its name if this machine's home, if there is one, knows it by that; paths go first."""
    if Path(base).exists():
        return base, None
    from server.settings import Settings

    if not Settings().key_path.exists():
        return base, None
    from server.bases.repository import BaseRepository
    from server.console import open_home

    _, database = open_home()
    try:
        with database.reading() as session:
            found = BaseRepository(session).by_name(base)
            return (base, None) if found is None else (found.source, found.name)
    finally:
        database.close()


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """What to tell of a stage and its fraction done; shown on a terminal, until the context ends."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(32), TimeElapsedColumn()
    with Progress(*columns, console=complaints, transient=True, disable=not complaints.is_terminal) as shown:
        line = shown.add_task("look", total=1.0)
        yield lambda stage, fraction: shown.update(line, description=stage, completed=fraction)
