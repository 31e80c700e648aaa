"""Compiles a program into a directory, unless the directory already contains it.

The manifest is written last and removed first, so a directory with a manifest has all files that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pydantic

from server.compiler.checkpoints.base import BaseFiles, base_name, locate_base
from server.programs.compiler_process import CompilerCrashed, CompilerProcess
from server.storage.scratch import scratch
from shared.canonical import file_sha256
from shared.durable import write_durably
from shared.errors import BadRequest
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import BaseRef, Recipe, RecipeSettings, check_trainable, resolve_layers

MANIFEST = "manifest.json"
LOG = "compile.log"  # output of the compiler and its libraries

COMPILER = [sys.executable, "-W", "ignore", "-m", "server.compiler"]
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Compiled:
    """A complete program in a directory. cached: it was compiled before."""

    manifest: ProgramManifest
    cached: bool


def compile_into(
    settings: RecipeSettings,
    source: str,
    out: Path,
    on_stage: Callable[[dict[str, Any]], None] = lambda stage: None,
    calibration: Path | None = None,
) -> Compiled:
    """Compiles `settings` on the base at `source` into directory `out`. The base is named after its file.

    settings: answer_length and choices must be set. on_stage: called with the compiler's stages. calibration: the file
    of the calibration that the settings name, if any. Raises InvalidRecipe for a precision that does not support
    training, the error that the compiler reports, or CompileFailed.
    """
    check_trainable(settings.precision)
    files = locate_base(source)
    # Hashing releases the interpreter lock, so base and program are read in parallel.
    with ThreadPoolExecutor() as pool:
        identity = pool.submit(lambda: files.sha256)
        existing = _whole(out, pool)
        sha256 = identity.result()
    recipe = _recipe(settings, source, files, sha256, existing)
    if existing is not None and existing.recipe == recipe and existing.executorch == version("executorch"):
        return Compiled(existing, cached=True)
    return Compiled(_compile(recipe, source, out, on_stage, calibration), cached=False)


def _whole(out: Path, pool: ThreadPoolExecutor) -> ProgramManifest | None:
    """Returns the manifest in `out` if every file that it names exists with the stated hash."""
    try:
        manifest = ProgramManifest.model_validate_json((out / MANIFEST).read_bytes())
    except (OSError, pydantic.ValidationError):
        return None
    return manifest if all(pool.map(lambda file: _holds(out / file.name, file), manifest.files)) else None


def _holds(path: Path, file: ProgramFile) -> bool:
    try:
        return path.stat().st_size == file.size and file_sha256(path) == file.sha256
    except OSError:
        return False


def _recipe(
    settings: RecipeSettings, source: str, files: BaseFiles, sha256: str, existing: ProgramManifest | None
) -> Recipe:
    layers = settings.layers
    if layers != "all":
        layers = resolve_layers(layers, _layer_count(source, sha256, existing))
    base = BaseRef(name=base_name(source, files), sha256=sha256)
    return Recipe.model_validate(settings.model_dump() | {"base": base, "layers": layers})


def _layer_count(source: str, sha256: str, existing: ProgramManifest | None) -> int:
    if existing is not None and existing.recipe.base.sha256 == sha256:
        return existing.shape.layers
    from server.compiler.checkpoints.checkpoint import inspect_base

    return inspect_base(source).layers


def _compile(
    recipe: Recipe, source: str, out: Path, on_stage: Callable[[dict[str, Any]], None], calibration: Path | None
) -> ProgramManifest:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"{out} cannot be a directory to write ({error.strerror})") from error
    log = out / LOG
    with scratch(out, ".compiling-") as workspace, log.open("wb") as log_file:
        process = CompilerProcess(COMPILER, POLL_SECONDS, None, lambda: True, on_stage=on_stage, log=log_file)
        try:
            path = str(Path(source).resolve()) if Path(source).exists() else source
            manifest = process.run(recipe, path, workspace, None if calibration is None else calibration.read_bytes())
        except CompilerCrashed as error:
            raise CompilerCrashed(f"the compiler died without saying why; {log} has its output") from error
        (out / MANIFEST).unlink(missing_ok=True)
        for file in manifest.files:
            (workspace / "program" / file.name).replace(out / file.name)
        write_durably(out / MANIFEST, manifest.model_dump_json(indent=1).encode(), 0o644)
    return manifest
