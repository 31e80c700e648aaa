"""What is lowered is kept for later compilations, which make the same bytes, and is never used where it is wrong."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.export import lowered_files
from server.compiler.export.backends import xnnpack
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from server.compiler.program import compile_program
from tests.server.compiler.conftest import make_tiny

EXAMPLE = (torch.zeros(2, 8),)


class Layer(nn.Module):
    """A linear layer in small, with a constant in its graph."""

    weight: Tensor
    table: Tensor

    def __init__(self, seed=0, outputs=4, factor=2.0, shift=0.5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(outputs, 8, generator=generator))
        self.register_buffer("table", torch.full((outputs,), shift), persistent=False)
        self.factor = factor

    def forward(self, x):
        return functional.linear(x, self.weight) * self.factor + self.table


@pytest.fixture
def lowerings(monkeypatch):
    """One entry for each graph that is lowered."""
    calls = []
    lower = xnnpack.preprocess
    monkeypatch.setattr(xnnpack, "preprocess", lambda program: (calls.append(0), lower(program))[1])
    return calls


def delegate(layer, directory):
    """A layer's delegate: its payload and its constants."""
    ((module,),) = xnnpack.lower_layers([LayerGroup([layer], EXAMPLE, None)], StoredKeys(), LoweredFiles(directory))
    return module.processed_bytes, [bytes(buffer) for buffer in module.named_data_store_output.buffers]


@pytest.mark.parametrize("other", [{"outputs": 5}, {"factor": 3.0}, {"shift": 0.25}], ids=str)
def test_another_graph_does_not(lowerings, tmp_path, other):
    expected = delegate(Layer(0, **other), None)
    delegate(Layer(0), tmp_path)
    assert delegate(Layer(0, **other), tmp_path) == expected
    assert len(lowerings) == 3


def test_another_toolchain_does_not(lowerings, tmp_path, monkeypatch):
    delegate(Layer(0), tmp_path)
    monkeypatch.setattr(lowered_files, "version", lambda library: "0.0")
    delegate(Layer(0), tmp_path)
    assert len(lowerings) == 2


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_damaged_file_is_written_anew(lowerings, tmp_path, place):
    expected = delegate(Layer(0), tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert [delegate(Layer(0), tmp_path) for _ in range(2)] == [expected] * 2
    assert len(lowerings) == 2
    path.write_bytes(content[: len(content) // 2])
    assert delegate(Layer(0), tmp_path) == expected


def test_the_ones_that_were_read_least_lately_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(lowered_files, "MAX_FILES", 2)
    for number, outputs in enumerate((4, 5)):
        delegate(Layer(0, outputs), tmp_path)
        for path in tmp_path.iterdir():
            os.utime(path, (number, number))
    kept = set(tmp_path.iterdir())
    delegate(Layer(0, 4), tmp_path)
    delegate(Layer(0, 6), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(kept & set(tmp_path.iterdir())) == 1


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").touch()
    assert delegate(Layer(0), tmp_path / "file") == delegate(Layer(0), None)


@pytest.mark.slow
def test_a_program_of_another_base_and_recipe_has_the_same_bytes(lowerings, tiny, tmp_path):
    other, kept = make_tiny(tmp_path / "other", seed=9), tmp_path / "kept"
    compile_program(tiny.recipe(precision="int8"), str(tiny.directory), tmp_path / "first", kept=kept)
    lowerings.clear()
    recipe = other.recipe(precision="int8", a_seed=7)
    manifest = compile_program(recipe, str(other.directory), tmp_path / "kept", kept=kept)
    assert not lowerings
    assert manifest == compile_program(recipe, str(other.directory), tmp_path / "anew")
