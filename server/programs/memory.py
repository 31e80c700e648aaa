"""What a compile takes of a machine's memory, estimated from shapes alone, and what a machine may give to compiles.

Knows no database and no compiler.
"""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package ships no types

from server.settings import Settings
from shared.lora import BaseShape, flat_size
from shared.recipe import Precision, Recipe

SHARE = 0.8  # of a machine's memory that its compiles may take; the rest is the workers', the server's and files'
LIBRARIES_BYTES = 450 << 20  # torch and ExecuTorch, before anything is read

# Bytes at the peak for each of the base's weights. Measured on SmolLM2-135M (134.5 million weights), XNNPACK, as the
# compiler's largest resident size: fp32 1,458 MiB, which is 7.9 a weight; int8-weight 1,762 MiB, 10.2.
_WEIGHT_BYTES: dict[Precision, float] = {
    "fp32": 8.0,  # float32 as read, and as written
    "int8": 10.5,  # and quantized, where it was only stored
    "int4": 10.5,
    "int8-weight": 10.5,
    "int4-weight": 10.5,
}
_ADAPTED_BYTES = 30  # for each element of B: it, its A and the graphs that have them; rank 64 on all layers: 1,750 MiB
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def compile_bytes(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Peak resident bytes of compiling `recipe` for a base of that shape and so many parameters, estimated."""
    weights = parameters * _WEIGHT_BYTES[recipe.precision]
    return LIBRARIES_BYTES + round(weights) + _ADAPTED_BYTES * flat_size(recipe, shape)


def host_budget(settings: Settings) -> tuple[int, bool]:
    """Bytes that this machine's compiles may take together, and whether an operator said so."""
    if settings.compile_budget_bytes is not None:
        return settings.compile_budget_bytes, True
    return round(machine_bytes() * SHARE), False


def machine_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """Memory of this machine, or of the container that this process runs in."""
    total = int(psutil.virtual_memory().total)
    for path in limits:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total
