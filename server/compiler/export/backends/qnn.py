"""Decoder layers for Qualcomm's neural processor (HTP), by Qualcomm's AI Engine Direct SDK; the rest stays portable.

Only the code up to the SDK has been tested, because the SDK requires a license from Qualcomm. It follows ExecuTorch's
own lowering. The processor computes in fp16. Noise, losses and the update of B run on the CPU in float32, so replay
stays exact. A layer's weights are in its delegate in the program file; the weights file contains the tensors that
portable operators read. A program is compiled for one chip.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.util import find_spec
from operator import getitem

from torch import Tensor, nn
from torch.export import ExportedProgram

from server.compiler.export.backends import Backend
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from shared.errors import ToolchainMissing

ROOT = "QNN_SDK_ROOT"
LIBRARY = "libQnnHtp.so"
CHIP = "MOBIZO_QNN_CHIP"  # Qualcomm's name of the chip


class Qnn(Backend):
    """Lowers a layer to one delegate if the processor supports all of it, otherwise to portable operators."""

    dynamic_length = False  # a delegate is compiled for one shape

    def check(self) -> None:
        """Raises ToolchainMissing, naming the SDK and the required environment variables.

        ExecuTorch could download the SDK itself. Installing it is left to the operator, who must accept its license.
        """
        if find_spec("executorch.backends.qualcomm.python.PyQnnManagerAdaptor") is None:
            raise ToolchainMissing(
                "backend qnn needs ExecuTorch's Qualcomm compiler, which its wheel has on x86-64 Linux only; "
                "run the server there"
            )
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset

        if not (os.environ.get(ROOT) and _loads(LIBRARY)):
            raise ToolchainMissing(
                "backend qnn needs the Qualcomm AI Engine Direct SDK (QNN), from Qualcomm's developer site: unpack it, "
                f"set {ROOT} to its folder, and add ${ROOT}/lib/x86_64-linux-clang, which has {LIBRARY}, to "
                "LD_LIBRARY_PATH before the server starts"
            )
        chips = sorted(chip.name for chip in QcomChipset if chip.value)
        if os.environ.get(CHIP) not in chips:
            raise ToolchainMissing(f"backend qnn compiles for one chip; set {CHIP} to one of {', '.join(chips)}")

    def lower(self, groups: Sequence[LayerGroup], stored: StoredKeys, kept: LoweredFiles) -> list[list[nn.Module]]:
        """Lowers each layer to one delegate with its own weights; see `Backend.lower`."""
        from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
        from executorch.backends.qualcomm.utils.utils import (
            generate_htp_compiler_spec,
            generate_qnn_executorch_compiler_spec,
            to_edge_transform_and_lower_to_qnn,
        )

        specs = generate_qnn_executorch_compiler_spec(
            soc_model=QcomChipset[os.environ[CHIP]], backend_options=generate_htp_compiler_spec(use_fp16=True)
        )
        lowered: list[list[nn.Module]] = []
        for group in groups:
            programs = (to_edge_transform_and_lower_to_qnn(layer, group.example, specs) for layer in group.layers)
            delegates = (whole_delegate(program.exported_program()) for program in programs)
            lowered.append([delegate or layer for delegate, layer in zip(delegates, group.layers, strict=True)])
        return lowered


def _loads(library: str) -> bool:
    """Returns whether the dynamic loader finds a library, as ExecuTorch requires."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class WholeDelegate(nn.Module):
    """The graph of a layer that only calls one delegate."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the layer's output."""
        (output,) = self.graph(*inputs)
        layer_output: Tensor = output
        return layer_output


def whole_delegate(program: ExportedProgram) -> WholeDelegate | None:
    """Returns the partitioned graph of a layer as an exportable module, or None if a part was not delegated."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function" and node.target is not getitem]
    if len(calls) != 1 or getattr(calls[0], "__name__", "") != "executorch_call_delegate":
        return None
    return WholeDelegate(program.graph_module)
