"""Adapters as PEFT directories for tests that load them with stock tools."""

from pathlib import Path

from server.registry.exports.peft import peft_files
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape


def write_peft(
    recipe: Recipe, shape: BaseShape, flat: F32, a_sha256: str, directory: Path, calibration: Calibration | None = None
) -> None:
    """Writes an adapter's PEFT files into `directory`. Raises the errors of `peft_files`."""
    files = peft_files(recipe, shape, flat, a_sha256, calibration)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
