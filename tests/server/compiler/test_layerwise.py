"""States and gradients of a base, one layer at a time, against those of transformers' whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.layerwise import LayerwisePasses
from server.compiler.model.backbone import Backbone
from shared.recipe import Target
from tests.server.compiler.conftest import VOCABULARY, Architectures

Observations = list[tuple[int, Target, Tensor, Tensor]]


class Counted(Mapping[str, Tensor]):
    """A layer's weights that count how often one of them is read."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.reads = weights, 0

    def __getitem__(self, name: str) -> Tensor:
        self.reads += 1
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3_text"])
def test_each_layer_is_read_once_in_each_direction(architectures: Architectures, name: str, tmp_path: Path) -> None:
    base = architectures.base(name)
    checkpoint = load_checkpoint(str(base.directory))
    layers = [Counted(layer) for layer in checkpoint.layers]
    count = len(layers)
    batches = [torch.randint(3, VOCABULARY, (2, length)) for length in (9, 5)]
    passes = LayerwisePasses(replace(checkpoint, layers=tuple(layers)), batches, tmp_path)
    observations: Observations = []

    def observe(number: int, target: Target, x: Tensor, y: Tensor) -> None:
        if target == "v_proj":
            y.register_hook(lambda delta: observations.append((number, target, x.detach(), delta)))

    for index in range(count):
        passes.forward(index, keep=index >= 1)
    weight = torch.randn(checkpoint.facts.hidden)

    def head(number: int, backbone: Backbone, hidden: Tensor) -> Tensor:
        everywhere = torch.arange(hidden.shape[1]).expand(len(hidden), -1)
        return (backbone.gather_positions(hidden, everywhere) @ weight).sum()

    passes.losses(head)
    for index in reversed(range(1, count)):
        passes.backward(index, observe)
    assert [layer.reads for layer in layers] == [len(layers[0]), *[2 * len(layer) for layer in layers[1:]]]
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"gradient"}  # of layer 1's inputs, unread

    model = base.model.eval()
    iterator = iter(observations)
    for index in reversed(range(1, count)):
        module = model.get_submodule(f"{'model.decoder' if name == 'opt' else 'model'}.layers.{index}.self_attn.v_proj")
        for number, batch in enumerate(batches):
            tensors: list[Tensor] = []
            handle = module.register_forward_hook(lambda _, inputs, output: tensors.extend((inputs[0], output)))  # noqa: B023
            hidden = model.base_model(batch, use_cache=False).last_hidden_state
            handle.remove()
            (delta,) = torch.autograd.grad((hidden @ weight).sum(), tensors[1])
            own_number, _, x, own_delta = next(iterator)
            assert own_number == number
            torch.testing.assert_close(x, tensors[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(own_delta, delta, atol=1e-5, rtol=1e-4)
    assert next(iterator, None) is None
