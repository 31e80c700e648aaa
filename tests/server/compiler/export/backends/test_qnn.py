"""Qualcomm's backend up to its SDK, which is not here: what is missing is named, and what is ours runs."""

import pytest
import torch
from torch import nn

from server.compiler.export.backends.qnn import CHIP, ROOT, Qnn
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from server.compiler.program import compile_program
from shared.errors import ToolchainMissing


def test_what_to_install_and_set_is_said(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv(ROOT, raising=False)
    out = tmp_path / "out"
    with pytest.raises(ToolchainMissing, match=r"AI Engine Direct SDK.*QNN_SDK_ROOT.*LD_LIBRARY_PATH") as error_info:
        compile_program(tiny.recipe(backend="qnn"), str(tiny.directory), out)
    assert (error_info.value.status, error_info.value.code) == (422, "toolchain-missing")
    assert not out.exists()


def test_a_folder_without_the_libraries_is_no_sdk(tmp_path, monkeypatch):
    monkeypatch.setenv(ROOT, str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"libQnnHtp\.so"):
        Qnn().check()


def test_the_way_of_lowering_reaches_the_sdk(tmp_path, monkeypatch):
    """All that ExecuTorch does before it opens Qualcomm's library works on a layer as we call it."""
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setenv(CHIP, "SM8650")
    with pytest.raises(RuntimeError, match="Failed to initialize QNN backend"):
        Qnn().lower([LayerGroup([Gate()], (torch.zeros(2, 8),), None)], StoredKeys(), LoweredFiles())


class Gate(nn.Module):
    """A layer in small."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x * torch.sigmoid(torch.nn.functional.linear(x, self.weight))
