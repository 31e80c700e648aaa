"""The converter as a child process. This process does not import torch.

Its command gets an order (`Order` as JSON), a raw B file, the base's source, an output directory and, where the recipe
names one, a calibration, and ends with {"files": [{"path", "size", "sha256"}, ...]}.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic
from pydantic import BaseModel, ConfigDict, TypeAdapter

from server.tasks.child_process import ChildProcess, Stopped
from shared.errors import ConversionFailed, MobizoError
from shared.protocol import MergedForm, PeftFile
from shared.recipe import Recipe, Sha256
from shared.zo.lora import BaseShape

ORDER, RAW_B, RESULT, CALIBRATION = "order.json", "lora_B.safetensors", "merged", "calibration.safetensors"
_FILES = TypeAdapter(list[PeftFile])


class ConverterCrashed(ConversionFailed):
    """The converter died without saying why; the server's log has its output."""


class Order(BaseModel):
    """The adapter to be merged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Recipe
    shape: BaseShape
    a_sha256: Sha256
    form: MergedForm = MergedForm.DIRECTORY


@dataclass
class ConverterProcess(ChildProcess):
    """One conversion."""

    task: ClassVar[str] = "conversion"
    result: ClassVar[str] = "files"
    failed: ClassVar[type[MobizoError]] = ConversionFailed
    crashed: ClassVar[type[MobizoError]] = ConverterCrashed

    def run(
        self, order: Order, raw_b: bytes, source: str, workspace: Path, calibration: bytes | None = None
    ) -> list[PeftFile] | Stopped:
        """Converts into `workspace`/merged; no process is left when it returns or raises.

        calibration: the file of the calibration that the recipe names, if any. Raises the error that the converter
        reports, ConverterCrashed, or ConversionFailed if it takes too much memory.
        """
        (workspace / ORDER).write_text(order.model_dump_json(), encoding="utf-8")
        (workspace / RAW_B).write_bytes(raw_b)
        calibration_argument = []
        if calibration is not None:
            (workspace / CALIBRATION).write_bytes(calibration)
            calibration_argument = [str(workspace / CALIBRATION)]
        result = self.listen(
            [str(workspace / ORDER), str(workspace / RAW_B), source, str(workspace / RESULT), *calibration_argument]
        )
        if isinstance(result, Stopped):
            return result
        try:
            files = _FILES.validate_python(result)
        except pydantic.ValidationError as error:
            raise ConversionFailed("the converter returned an invalid list of files") from error
        if not files or any(Path(file.path).name != file.path for file in files):
            raise ConversionFailed("the converter returned invalid file names")
        return files
