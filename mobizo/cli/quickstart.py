"""`mobizo quickstart`: runs a server and a device on this machine. They need packages that the client does not."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from mobizo.cli.console import Json, stop
from shared.errors import BadRequest, MobizoError

commands = typer.Typer()
INTERRUPTED = 130  # exit status


@commands.command()
def quickstart(
    base: Annotated[str, typer.Option(help="Base model: a .gguf file, a directory, or an id of the Hugging Face Hub.")],
    data: Annotated[Path, typer.Option(help="File of records: CSV, TSV, JSON, JSON lines, text, mbox or Parquet.")],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task: a JSON file or a shipped task's name. Default: what the columns suggest: text "
            "and label, text alone, prompt and answer, or messages."
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--map", metavar="FIELD=COLUMN", help="Read this column as this field.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of data set and adapter. Default: derived from the file's name.")
    ] = None,
    add: Annotated[
        bool,
        typer.Option("--add", help="Add the file to the data set of this name, and train anew on all its records."),
    ] = False,
    continue_: Annotated[
        bool,
        typer.Option("--continue", help="As --add, but start from the adapter's current version."),
    ] = False,
    form: Annotated[
        str | None, typer.Option("--format", help="Format, as in `mobizo-agent data add`. Default: by the suffix.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="For CSV: one character, comma, semicolon, tab or pipe. Default: detected.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Encoding of text, such as cp1252. Default: UTF-8, or by the byte order mark.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="About how long training may take; sets the number of steps.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of a new data set's split and of the training.")
    ] = 0,
    home: Annotated[Path, typer.Option(help="Directory of server and device, which later runs use again.")] = Path(
        "~/.mobizo-quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Personalize a model on your own file, on this machine, with one command.

    Starts a server and a device, adds the file to the device, trains, and leaves the adapter on the device.
    """
    try:
        # Imported here because it loads the device agent, which the client does not need. The server runs beside it.
        for package in ("executorch", "fastapi", "transformers"):
            if find_spec(package) is None:
                raise ImportError(name=package)
        from mobizo.quickstart.data import FileOptions, file_format
        from mobizo.quickstart.run import Options, show_report
        from mobizo.quickstart.run import quickstart as run
    except ImportError as error:
        raise stop(
            f"the package {error.name}, which quickstart needs, is not installed: pip install 'mobizo[demo]'", 2
        ) from error

    console = Console(stderr=as_json, highlight=False)
    directory = home.expanduser().absolute()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        file = FileOptions(
            path=data,
            fields=tuple(fields or ()),
            task=task,
            name=name,
            adds=add or continue_,
            form=file_format(form),
            delimiter=delimiter,
            encoding=encoding,
            seed=seed,
        )
        report = run(Options(base, file, directory, minutes, continue_), console)
    except MobizoError as error:
        raise stop(error.detail, 2 if isinstance(error, BadRequest) else 1) from error
    except KeyboardInterrupt as error:
        raise stop("stopped, with server and agent; the same command continues from here", INTERRUPTED) from error
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show_report(report, console)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
