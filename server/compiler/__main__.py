"""`python -m server.compiler RECIPE.json SOURCE OUT_DIR [CALIBRATION]`: runs one compilation in a separate process.

Prints one JSON object per line: {"stage", "fraction"} during the compilation, then {"manifest"}, or {"error": {"code",
"detail"}} with exit code 1. To cancel a compilation, kill the process. The environment's LOWERED names a directory of
what earlier compilations lowered.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
from pathlib import Path

import pydantic

from server.compiler.program import compile_program
from server.compiler.worker_protocol import LOWERED, Lines
from shared.errors import CompileFailed, InvalidRecipe, MobizoError
from shared.invalid_fields import first_invalid
from shared.recipe import Recipe
from shared.zo.calibration import read_calibration

_M_MMAP_THRESHOLD = -3  # glibc's malloc.h
_LARGE_BYTES = 1 << 20
# Objects between two collections: graphs are millions of objects that live to the end, and 700 costs 6 % of the time.
_GARBAGE = (100_000, 50, 100)


def main(arguments: list[str]) -> int:
    """Runs the compilation that the arguments describe. Returns the exit code."""
    _return_large_blocks()
    gc.set_threshold(*_GARBAGE)
    lines = Lines()
    recipe_path, source, out_dir, *rest = arguments
    try:
        recipe = _read_recipe(Path(recipe_path))
        manifest = compile_program(
            recipe,
            source,
            Path(out_dir),
            lines.stage,
            calibration=read_calibration(Path(rest[0])) if rest else None,
            kept=Path(os.environ[LOWERED]) if os.environ.get(LOWERED) else None,
        )
    except Exception as error:
        if not isinstance(error, MobizoError):
            traceback.print_exc()
            error = CompileFailed(f"the compiler stopped: {type(error).__name__}: {error}")
        lines.say({"error": {"code": error.code, "detail": error.detail}})
        return 1
    lines.say({"manifest": manifest.model_dump(mode="json")})
    return 0


def _return_large_blocks() -> None:
    """Makes glibc return each tensor's memory to the system when it is freed.

    By default glibc raises its threshold up to 32 MB and keeps smaller blocks in a heap that the tensors of a base
    fragment: on a base of 1.1 billion parameters, the heap grows by 1.2 GB. Other C libraries have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _read_recipe(path: Path) -> Recipe:
    try:
        return Recipe.model_validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        raise InvalidRecipe(str(first_invalid(error))) from error


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit("usage: python -m server.compiler RECIPE.json SOURCE OUT_DIR [CALIBRATION]")
    sys.exit(main(sys.argv[1:]))
