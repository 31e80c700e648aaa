"""`mobizo-server compile`: compiles programs without a home."""

from __future__ import annotations

import logging
import time
import warnings
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer

from server.cli.console import Json, complaints, tell_figures
from shared.errors import InvalidRecipe
from shared.invalid_fields import first_invalid
from shared.program import ProgramManifest
from shared.recipe import RecipeSettings
from shared.zo.calibration import read_calibration

RecipeFile = Annotated[
    Path | None,
    typer.Option(help="JSON file with settings as in `recipe` of a job, for example rank and layers. Default: {}."),
]


def compile_program(
    base: Annotated[str, typer.Option(help="Base model: Hugging Face directory or id, or a .gguf file.")],
    out: Annotated[Path, typer.Option("--to", help="Directory for the program, its weights and manifest.json.")],
    recipe: RecipeFile = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File created by `calibrate` from which A is taken. Default: random A.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a program into a directory. A complete program of the same recipe there is reused.

    Unless the recipe says otherwise, answers have one token and examples have two answers.
    """
    from server.programs.local import compile_into

    began = time.monotonic()
    settings = read_recipe(recipe)
    named = {} if calibration is None else {"calibration": read_calibration(calibration).sha256}
    lengths = {"answer_length": settings.answer_length or 1, "choices": settings.choices or 2}
    with complaints.status("reading the base") as status:
        compiled = compile_into(
            settings.model_copy(update=lengths | named),
            base,
            out,
            lambda progress: status.update(str(progress.get("stage", "compiling"))),
            calibration,
        )
    tell_figures(as_json, _figures(compiled.manifest, time.monotonic() - began, compiled.cached))


def read_recipe(path: Path | None) -> RecipeSettings:
    """Returns the recipe settings in a JSON file; None: the defaults. Raises InvalidRecipe."""
    if path is None:
        return RecipeSettings()
    try:
        return RecipeSettings.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise InvalidRecipe(f"{path}: cannot be read ({error.strerror})") from error
    except pydantic.ValidationError as error:
        raise InvalidRecipe(f"{path}: {first_invalid(error)}") from error


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppresses the warnings that ExecuTorch's libraries emit while they are imported."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _figures(manifest: ProgramManifest, seconds: float, cached: bool) -> dict[str, Any]:
    sizes = {file.role: file.size for file in manifest.files}
    return {
        "recipe_id": manifest.recipe_id,
        "seconds": round(seconds, 3),
        "cached": cached,
        "pte_bytes": sizes["program"],
        "ptd_bytes": sizes["weights"],
        **({"inference_bytes": sizes["inference"]} if "inference" in sizes else {}),
        "planned_bytes": manifest.planned_bytes,
        "delegates": manifest.delegates,
        "nodes": manifest.nodes,
        "flops_per_step": manifest.flops_per_step,
    }
