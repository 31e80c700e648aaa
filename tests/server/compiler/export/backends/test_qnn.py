"""Qualcomm's backend up to its SDK, which is not here: what is missing is named, and what is ours runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from server.compiler import compile_program
from server.compiler.export.backends.qnn import CHIP, ROOT, Qnn, whole_delegate
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from shared.errors import ToolchainMissing
from tests.server.compiler.conftest import TinyBase


def test_what_to_install_and_set_is_said(tiny: TinyBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT, raising=False)
    out = tmp_path / "out"
    with pytest.raises(ToolchainMissing, match=r"AI Engine Direct SDK.*QNN_SDK_ROOT.*LD_LIBRARY_PATH") as error_info:
        compile_program(tiny.recipe(backend="qnn"), str(tiny.directory), out)
    assert (error_info.value.status, error_info.value.code) == (422, "toolchain-missing")
    assert not out.exists()


def test_a_folder_without_the_libraries_is_no_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"libQnnHtp\.so"):
        Qnn().check()


def test_the_way_of_lowering_reaches_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ExecuTorch does before it opens Qualcomm's library works on a layer as we call it."""
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv(CHIP, "SM8650")
    with pytest.raises(RuntimeError, match="Failed to initialize QNN backend"):
        Qnn().lower([LayerGroup([Gate()], (torch.zeros(2, 8),), None)], StoredKeys(), LoweredFiles())


class Gate(nn.Module):
    """A layer in small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(torch.nn.functional.linear(x, self.weight))


class Sorted(Gate):
    """One that no delegate takes whole."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(super().forward(x)).values


class Twice(nn.Module):
    """A method that runs a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x * 2.0) + 1.0
        return output


def partitioned(layer: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    """As Qualcomm's lowering gives it, but for XNNPACK, which is here."""
    return to_edge_transform_and_lower(
        export(layer, example, strict=True),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    ).exported_program()


def test_a_layer_that_is_taken_whole_runs_inside_a_method() -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    layer = whole_delegate(partitioned(Gate(), (x,)))
    assert layer is not None
    program = to_edge(export(Twice(layer), (x,), strict=False)).to_executorch()
    (plan,) = program.executorch_program.execution_plan
    assert [delegate.id for delegate in plan.delegates] == ["XnnpackBackend"]
    (output,) = _load_for_executorch_from_buffer(program.buffer).run_method("forward", (x,))
    torch.testing.assert_close(output, Twice(Gate())(x))


def test_a_layer_of_which_something_is_left_is_not() -> None:
    assert whole_delegate(partitioned(Sorted(), (torch.zeros(2, 8),))) is None
