"""The `mobizo-server` commands on base models. A check imports no database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.console import Json, open_home, rows_of, tell, tell_rows
from shared.errors import MobizoError

if TYPE_CHECKING:
    from server.database.database import Database
    from server.storage.store import ArtifactStore

app = typer.Typer(help="Base models that jobs may use.", no_args_is_help=True)
Source = Annotated[str, typer.Argument(help="Hugging Face directory or id, or a .gguf file.")]
BASE_COLUMNS = ("name", "parameters", "hub_id", "sha256", "source")


@app.command("add")
def add_base(
    name: Annotated[str, typer.Argument(help="Name that jobs will use.")],
    source: Source,
    hub_id: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The model's id on the Hugging Face Hub, named by exported adapters."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what `base check` prints, and register nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Register a base model: read its configuration and tokenizer, and allow jobs to use it."""
    from server.catalog.bases import BaseService, check_names, inspect
    from server.compiler.checkpoints.checkpoint import inspect_headers

    check_names(name, hub_id)
    if dry_run:
        _tell_check(source, as_json)
        return
    if Path(source).exists():
        inspect_headers(source)  # what is refused is refused before the home is opened, which takes a second
    database, artifacts = _open()
    inspected = inspect(name, source, artifacts, hub_id)
    with database.writing() as session:
        base = BaseService(session, artifacts).register(inspected)
    (value,) = rows_of([base], BASE_COLUMNS)
    tell(as_json, value, f"{base.name}: {base.shape.architecture}, {base.parameters:,} parameters, {base.sha256}")


@app.command("check")
def check_source(
    source: Source,
    as_json: Json = False,
) -> None:
    """Report what a base model can do here, or why it is refused, without reading or downloading its weights.

    Prints its architecture, precisions, estimators and back ends, and the predicted memory of the default recipe.
    A refusal ends with exit code 1, as JSON with the field `refused`.
    """
    _tell_check(source, as_json)


def _tell_check(source: str, as_json: bool) -> None:
    from server.jobs.base_check import check_base

    try:
        check = check_base(source)
    except MobizoError as error:
        if not as_json:
            raise
        tell(as_json, {"source": source, "refused": error.detail}, "")
        raise typer.Exit(1) from error
    tell(as_json, check.model_dump(mode="json"), "\n".join(check.lines))


@app.command("tokenizer")
def write_base_tokenizer(
    name: Annotated[str, typer.Argument(help="Name of a registered base.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
    as_json: Json = False,
) -> None:
    """Write the tokenizer.json of a base model, with which `mobizo-agent data add --base` counts tokens."""
    from server.catalog.bases import BaseRepository

    database, artifacts = _open()
    with database.reading() as session:
        base = BaseRepository(session).get(name)
    file.write_bytes(artifacts.read(base.tokenizer_sha256))
    tell(as_json, {"name": name, "file": str(file)}, f"{file}")


@app.command("list")
def list_bases(as_json: Json = False) -> None:
    """List base models."""
    from server.catalog.bases import BaseRepository

    database, _ = _open()
    with database.reading() as session:
        rows = rows_of(BaseRepository(session).all(), BASE_COLUMNS)
    tell_rows(as_json, rows, BASE_COLUMNS)


def _open() -> tuple[Database, ArtifactStore]:
    """Opens the home. Returns its database and its files."""
    from server.storage.opening import open_artifacts
    from server.wiring import wire

    wire()
    settings, database = open_home()
    return database, open_artifacts(settings)
