"""The compiler as a child process, so that this process does not import torch.

Its arguments are a recipe file, the base's source, an output directory and, if the recipe names one, a calibration. Its
result is {"manifest": ...}.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic

from server.tasks.child_process import ChildProcess, Stopped
from shared.errors import CompileFailed, MobizoError
from shared.program import ProgramManifest
from shared.recipe import Recipe

CALIBRATION = "calibration.safetensors"


class CompilerCrashed(CompileFailed):
    """The compiler died without saying why; the server's log has its output."""


@dataclass
class CompilerProcess(ChildProcess):
    """One compilation."""

    task: ClassVar[str] = "compilation"
    result: ClassVar[str] = "manifest"
    failed: ClassVar[type[MobizoError]] = CompileFailed
    crashed: ClassVar[type[MobizoError]] = CompilerCrashed

    def run(
        self, recipe: Recipe, source: str, workspace: Path, calibration: bytes | None = None
    ) -> ProgramManifest | Stopped:
        """Compiles into `workspace`/program; no process is left when it returns or raises.

        calibration: the file of the calibration that the recipe names, if any.

        Raises the error that the compiler reports, CompilerCrashed, or CompileFailed if it takes too much memory.
        """
        recipe_path = workspace / "recipe.json"
        recipe_path.write_text(recipe.model_dump_json(), encoding="utf-8")
        calibration_argument = []
        if calibration is not None:
            (workspace / CALIBRATION).write_bytes(calibration)
            calibration_argument = [str(workspace / CALIBRATION)]
        result = self.listen([str(recipe_path), source, str(workspace / "program"), *calibration_argument])
        if isinstance(result, Stopped):
            return result
        try:
            manifest = ProgramManifest.model_validate(result)
        except pydantic.ValidationError as error:
            raise CompileFailed("the compiler returned an invalid manifest") from error
        if manifest.recipe_id != recipe.id or manifest.recipe.id != recipe.id:
            raise CompileFailed("the compiler returned a program of another recipe")
        return manifest
