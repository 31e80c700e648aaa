"""The table of files that a version can be converted to at once, by name.

A converter takes the version's recipe, its base's shape, flat B (D,), the fingerprint of the A that B was trained with
and the calibration that the recipe names, if it names one, and gives the file's bytes: always the same for the same
arguments, so that two who convert at once store one file. `lora_B.safetensors` is not among them: it is the file that
the device uploaded, whose hash the manifest states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from server.registry.exports.gguf import gguf_lora
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape

Converter = Callable[[Recipe, BaseShape, F32, str, Calibration | None], bytes]

GGUF_NAME = "adapter.gguf"
CONVERTERS: Mapping[str, Converter] = {GGUF_NAME: gguf_lora}
