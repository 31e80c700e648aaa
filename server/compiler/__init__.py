"""The compiler: a recipe and a base model become a multi-method ExecuTorch program with external weights.

torch is imported on the first use of a name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.compiler.checkpoints.base import BaseFacts
    from server.compiler.checkpoints.checkpoint import inspect_base
    from server.compiler.program import compile_program

__all__ = ["BaseFacts", "compile_program", "inspect_base"]

HOMES = {
    "BaseFacts": "checkpoints.base",
    "compile_program": "program",
    "inspect_base": "checkpoints.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
