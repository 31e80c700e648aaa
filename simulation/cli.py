"""The `mobizo simulate` command: options and terminal output."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from shared.errors import BadRequest, MobizoError
from simulation.executors import Engine
from simulation.settings import SimulationSettings, read_settings

out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)

TABLE_COLUMNS = ("round", "counted", "dropped", "refused", "accuracy", "loss", "devices")  # of the terminal


def simulate(
    directory: Annotated[Path, typer.Argument(help="directory of the report; an interrupted simulation is resumed")],
    config: Annotated[Path | None, typer.Option(help="TOML file; flags override its settings")] = None,
    devices: Annotated[int | None, typer.Option(help="virtual devices; default 200")] = None,
    rounds: Annotated[int | None, typer.Option(help="number of rounds; default 5")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of all random choices")] = None,
    base: Annotated[str | None, typer.Option(help="Hugging Face directory or id, or .gguf; default: built in")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="directory with train.jsonl; repeatable")] = None,
    task: Annotated[str | None, typer.Option(help="name of a built-in task")] = None,
    partition: Annotated[str | None, typer.Option(help="iid, dirichlet (default) or source")] = None,
    poisoned: Annotated[float | None, typer.Option(help="share of devices that attack")] = None,
    attack: Annotated[
        str | None, typer.Option(help="sign_flip, huge, random, collusion, labels, not_finite or claims")
    ] = None,
    aggregator: Annotated[str | None, typer.Option(help="mean, median, trimmed_mean, krum or multi_krum")] = None,
    engine: Annotated[str, typer.Option(help="processes or inline (in this process)")] = "processes",
    workers: Annotated[int | None, typer.Option(min=1, help="number of workers; default: one for each core")] = None,
    program: Annotated[
        Path | None, typer.Option(help="directory for the compiled program, shared between simulations")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Simulate a cohort: many virtual devices train a shared adapter in rounds."""
    try:
        flags = _set_options(
            devices=devices,
            rounds=rounds,
            seed=seed,
            base=base,
            data=_set_options(sources=[str(path) for path in data] if data else None, partition=partition),
            faults=_set_options(poisoned=poisoned, attack=attack),
            cohort=_set_options(task=task, aggregator=_set_options(name=aggregator) or None),
        )
        _run(read_settings(config, flags), directory, _engine(engine), workers, program, as_json)
    except MobizoError as error:
        raise _stop(error.detail, 1) from error
    except OSError as error:
        raise _stop(f"{error.filename or directory}: {error.strerror or error}", 1) from error
    except KeyboardInterrupt:
        message = f"stopped; finished rounds are in {directory}, and the same command resumes the simulation"
        raise _stop(message, 130) from None


def _stop(message: str, status: int) -> typer.Exit:
    err.print(message, style="red", markup=False)
    return typer.Exit(status)


def _engine(name: str) -> Engine:
    if name not in get_args(Engine):
        raise BadRequest(f"unknown engine {name!r}; choose {', '.join(get_args(Engine))}")
    return cast(Engine, name)


def _run(
    settings: SimulationSettings,
    directory: Path,
    engine: Engine,
    workers: int | None,
    program: Path | None,
    as_json: bool,
) -> None:
    # Imported after the settings are validated, because training and compilation load hundreds of megabytes.
    from simulation import report
    from simulation.session import Resources, SimulationOutcome
    from simulation.session import simulate as run

    logging.getLogger("root").setLevel(logging.ERROR)
    start = time.monotonic()
    outcome: SimulationOutcome
    with _progress() as progress:
        rounds_task = progress.add_task("rounds", total=settings.rounds)
        step_task = progress.add_task("compiling", total=None)

        def on_progress(activity: str, done: int, total: int) -> None:
            number = int(activity.split()[-1]) if activity.split()[-1].isdigit() else 1
            progress.update(rounds_task, completed=number - 1)
            progress.update(step_task, description=activity, completed=done, total=total if total > 1 else None)

        outcome = run(settings, directory, Resources(engine, workers, program), on_progress)
        progress.update(rounds_task, completed=settings.rounds)
        progress.remove_task(step_task)
    report.write(outcome, directory)
    if as_json:
        out.print(json.dumps(report.document(outcome)), markup=False, soft_wrap=True)
        return
    table = Table(*TABLE_COLUMNS, box=None)
    for row in report.rows(outcome):
        table.add_row(*(str(row[report.COLUMNS.index(name)]) for name in TABLE_COLUMNS))
    out.print(table)
    for line in report.remarks(outcome):
        out.print(line, markup=False)
    out.print(f"{directory / 'report.md'}  {time.monotonic() - start:.0f} s", markup=False, soft_wrap=True)


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def _set_options(**fields: Any) -> dict[str, Any]:
    """Returns the given options. `read_settings` ignores empty tables."""
    return {name: value for name, value in fields.items() if value is not None}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `mobizo simulate`. arguments: None for the process's own."""
    app = typer.Typer(add_completion=False)
    app.command()(simulate)
    app(arguments, prog_name="mobizo simulate")
