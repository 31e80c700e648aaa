"""Layers as Vulkan delegates, by what the program says: the wheel's runtime has no Vulkan to run it with."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from device_agent.errors import RuntimeFailed
from device_agent.executors.python import open_program
from server.compiler.export.backends.vulkan import Vulkan, takes_whole
from server.compiler.export.backends.xnnpack import edge_program
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup
from server.compiler.export.weights import StoredKeys
from shared.canonical import file_sha256
from shared.program import ProgramManifest
from shared.recipe import TARGETS
from shared.zo.noise import query_seeds
from tests.programs import shared_store
from tests.server.compiler.conftest import Programs, TinyBase


@pytest.fixture(scope="module")
def program(tiny: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ProgramManifest]:
    directory = tmp_path_factory.mktemp("vulkan")
    recipe = tiny.recipe(backend="vulkan", queries=1, targets=TARGETS)
    return directory, shared_store().put(recipe, tiny.directory, directory)


@pytest.mark.slow
def test_every_layer_is_a_delegate(program: tuple[Path, ProgramManifest]) -> None:
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
def test_delegates_ask_the_shared_file_for_their_own_weights(
    program: tuple[Path, ProgramManifest], programs: Programs, tiny: TinyBase
) -> None:
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

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(torch.nn.functional.linear(x, self.weight)).values


def test_a_layer_that_vulkan_does_not_take_whole_stays_portable() -> None:
    layer, example = Sorted(), (torch.zeros(2, 8),)
    assert not takes_whole(edge_program(export(layer, example, strict=False)))
    assert Vulkan().lower([LayerGroup([layer], example, None)], StoredKeys(), LoweredFiles()) == [[layer]]


@pytest.mark.slow
def test_the_wheels_runtime_says_that_it_cannot(program: tuple[Path, ProgramManifest]) -> None:
    from executorch.extension.pybindings.portable_lib import _get_registered_backend_names

    assert "VulkanBackend" not in _get_registered_backend_names()
    directory, manifest = program
    runtime = open_program(manifest, directory / "program.pte", directory / "weights.ptd")
    flat = np.arange(manifest.size, dtype=np.float32)
    runtime.load(flat)  # what runs no layer runs anywhere
    recipe = manifest.recipe
    runtime.replay(query_seeds(0, 0, recipe.queries), np.ones(1, np.float32), 0.01)
    assert np.abs(runtime.adapter() - flat).max() == 1
    tokens = np.zeros((recipe.effective_batch, recipe.sequence_length), np.int64)
    places = np.zeros((recipe.effective_batch, recipe.answer_length), np.int64)
    batch = (tokens, places, places, np.ones(places.shape, np.float32))
    before = runtime.adapter()
    with pytest.raises(RuntimeFailed, match="'step' of the program does not load"):
        runtime.step(batch, query_seeds(0, 0, recipe.queries), 0.1, 0.01)
    np.testing.assert_array_equal(runtime.adapter(), before)
