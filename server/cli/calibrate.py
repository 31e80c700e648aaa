"""`mobizo-server calibrate`: creates a calibration file. It opens a home only to look up registered bases."""

from __future__ import annotations

import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from server.cli.compile import RecipeFile, quiet_libraries, read_recipe
from server.cli.console import Json, complaints, tell_figures, transaction
from shared.errors import InvalidTask
from shared.task import Task
from shared.task_templates import named_task
from shared.zo.calibration import Kind


def calibrate(
    base: Annotated[str, typer.Option(help="Name of a registered base, Hugging Face directory or id, or .gguf file.")],
    task: Annotated[str, typer.Option(help="Name of a built-in task, or a .json file with a task.")],
    data: Annotated[
        Path, typer.Option(help="JSONL file of public records; do not use private training data of devices.")
    ],
    out: Annotated[Path, typer.Option("--to", help="Output file.")],
    recipe: RecipeFile = None,
    kind: Annotated[str, typer.Option(help="Kind: gradients or activations.")] = "gradients",
    examples: Annotated[int, typer.Option(min=1, help="Maximum number of records.")] = 200,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="Scale each linear layer's A so that gradients are equally large in all; for estimator replay, whose "
            "steps have one rate for all.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a calibration: the most important input directions of each linear layer, used as A by recipes.

    The recipe's rank is the number of directions, and the largest LoRA rank that the calibration supports. Its targets,
    layers, loss and sequence_length are used, too, and answer_length and choices if answers depend on the record.
    """
    began = time.monotonic()
    settings = read_recipe(recipe)
    if kind not in get_args(Kind):
        complaints.print(f"error: --kind: must be {' or '.join(get_args(Kind))}", style="red", markup=False)
        raise typer.Exit(2)
    if balance and kind != "gradients":
        complaints.print("error: --balance: needs --kind gradients", style="red", markup=False)
        raise typer.Exit(2)
    with quiet_libraries(), _bar() as progress:
        from server.catalog.calibrations.local import calibrate_from

        calibration = calibrate_from(
            *_source(base), settings, cast(Kind, kind), _task(task), data, examples, out, progress, balance=balance
        )
    figures = {
        "sha256": calibration.sha256,
        "base": calibration.metadata.base.name,
        "base_sha256": calibration.metadata.base.sha256,
        "kind": calibration.metadata.kind,
        "task": calibration.metadata.task,
        "examples": calibration.metadata.examples,
        "modules": len(calibration.directions),
        "width": calibration.width,
        "balanced": calibration.metadata.scales is not None,
        "bytes": out.stat().st_size,
        "seconds": round(time.monotonic() - began, 1),
    }
    tell_figures(as_json, figures)


def _task(name: str) -> Task:
    path = Path(name)
    if path.suffix != ".json":
        return named_task(name)
    try:
        return Task.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise InvalidTask(f"{path}: the task cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InvalidTask(f"{path}: not a valid task ({str(error).splitlines()[0]})") from error


def _source(base: str) -> tuple[str, str | None]:
    """Returns the source of the base and, if it is registered in this machine's home, its name.

    An existing path takes precedence over a registered name.
    """
    if Path(base).exists():
        return base, None
    from server.settings import Settings

    if not Settings().key_path.exists():
        return base, None
    from server.catalog.bases import BaseRepository

    with transaction() as session:
        registered = BaseRepository(session).by_name(base)
        return (base, None) if registered is None else (registered.source, registered.name)


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """Shows a progress bar if stderr is a terminal. Yields a function that takes the stage and the fraction done."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(32), TimeElapsedColumn()
    with Progress(*columns, console=complaints, transient=True, disable=not complaints.is_terminal) as progress_bar:
        line = progress_bar.add_task("reading the base", total=1.0)
        yield lambda stage, fraction: progress_bar.update(line, description=stage, completed=fraction)
