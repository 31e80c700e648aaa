"""Layers as Vulkan delegates, by what the program says: the wheel's runtime has no Vulkan to run it with."""

from hashlib import sha256

import pytest
import torch
from torch import nn
from torch.export import export

from server.compiler.export.backends.vulkan import Vulkan, takes_whole
from server.compiler.export.emission import edge_program
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from shared.canonical import file_sha256
from shared.recipe import TARGETS
from tests.programs import shared_store


@pytest.fixture(scope="module")
def program(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("vulkan")
    recipe = tiny.recipe(backend="vulkan", queries=1, targets=TARGETS)
    return directory, shared_store().put(recipe, tiny.directory, directory)


@pytest.mark.slow
def test_every_layer_is_a_delegate(program):
    from executorch.exir._serialize._program import deserialize_pte_binary

    directory, manifest = program
    plans = {
        plan.name: [delegate.id for delegate in plan.delegates]
        for plan in deserialize_pte_binary((directory / "program.pte").read_bytes()).program.execution_plan
    }
    layers = ["VulkanBackend"] * manifest.shape.layers
    assert plans == {"step": layers, "score": layers, "adapter": [], "load": [], "replay": []}
    assert manifest.delegates == 2 * manifest.shape.layers
    assert not manifest.dynamic_length


@pytest.mark.slow
def test_delegates_ask_the_shared_file_for_their_own_weights(program, programs, tiny):
    """By content, as XNNPACK does, so both backends have one weights file; the program holds none of it."""
    directory, _ = program
    other = programs(tiny, queries=1, targets=TARGETS)
    assert file_sha256(directory / "weights.ptd") == file_sha256(other.directory / "weights.ptd")
    data = (directory / "program.pte").read_bytes()
    weights = [
        tensor.numpy().tobytes() for name, tensor in tiny.model.state_dict().items() if name.endswith("proj.weight")
    ]
    assert len(weights) == 7 * 2
    for weight in weights:
        assert data.count(sha256(weight).hexdigest().encode()) == 1  # in one delegate, which step and score share
        assert weight not in data


class Sorted(nn.Module):
    """A linear layer and an operator that Vulkan has not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.eye(8))

    def forward(self, x):
        return torch.sort(torch.nn.functional.linear(x, self.weight)).values


def test_a_layer_that_vulkan_does_not_take_whole_stays_portable():
    layer, example = Sorted(), (torch.zeros(2, 8),)
    assert not takes_whole(edge_program(export(layer, example, strict=False)))
    assert Vulkan().lower([LayerGroup([layer], example, None)], StoredKeys(), LoweredFiles()) == [[layer]]
