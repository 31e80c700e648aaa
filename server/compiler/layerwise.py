"""Passes batches of texts through a base model one decoder layer at a time, forwards and backwards, for calibrations.

The hidden states of all batches wait in files between two layers, so that memory holds one layer, or one table, in
float32, whatever the number of layers and texts. Each layer is read once in each direction. A layer's backward pass
computes the layer again from its stored input.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from server.compiler.checkpoints.checkpoint import Checkpoint
from server.compiler.model.backbone import Backbone, BackboneTensors
from server.compiler.model.decoder import DecoderLayer, LayerShape, all_tables
from shared.recipe import Target

Observe = Callable[[int, Target, Tensor, Tensor], None]  # batch, linear layer, its input x (E, S, in), its output
Head = Callable[[int, Backbone, Tensor], Tensor]  # batch, lm_head and final norm, hidden (E, S, hidden) -> loss


class _ObservedLayer(DecoderLayer):
    """A frozen decoder layer whose linear layers show their inputs and outputs."""

    def __init__(self, shape: LayerShape, weights: Mapping[str, Tensor]) -> None:
        super().__init__(shape, weights, {})
        self.observe: Callable[[Target, Tensor, Tensor], None] = lambda target, x, y: None

    def _linear(self, target: Target, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        y = self.frozen(target, x)
        self.observe(target, x, y)
        return y


class LayerwisePasses:
    """Batches of tokens and their hidden states in a base."""

    def __init__(self, checkpoint: Checkpoint, tokens: Sequence[Tensor], directory: Path) -> None:
        """tokens: (E, S) of each batch; S may differ. directory: an empty one, for 4 E S hidden bytes a batch."""
        self._checkpoint, self._directory = checkpoint, directory
        self._sizes = [(*batch.shape, checkpoint.facts.hidden) for batch in tokens]
        self._vectors = _backbone(checkpoint)
        longest = max(size[1] for size in self._sizes)
        self._tables = all_tables(checkpoint.facts, longest)
        backbone = _backbone(checkpoint, "embedding", "positions")
        for number, batch in enumerate(tokens):
            self._put("hidden", 0, number, backbone.embed(batch))

    def forward(self, index: int, observe: Observe | None = None, *, keep: bool = False) -> None:
        """Passes all batches, in order, through layer `index`. keep: its input stays, for `backward`."""
        layer = self._layer(index)
        for number in range(len(self._sizes)):
            layer.observe = _of_batch(observe, number)
            with torch.no_grad():
                states = layer(self._get("hidden", index, number), *self._others(index, number))
            self._put("hidden", index + 1, number, states)
            if not keep:
                self._path("hidden", index, number).unlink()

    def losses(self, head: Head) -> None:
        """Computes each batch's loss from the states after the last layer, and its gradient by them."""
        last = self._checkpoint.facts.layers
        backbone = _backbone(self._checkpoint, "embedding" if self._checkpoint.facts.tied else "lm_head")
        for number in range(len(self._sizes)):
            states = self._get("hidden", last, number).requires_grad_()
            head(number, backbone, states).backward()
            self._put("gradient", last, number, _gradient(states))
            self._path("hidden", last, number).unlink()

    def backward(self, index: int, observe: Observe) -> None:
        """Passes the gradients of all batches back through layer `index`, once `forward` has kept its input."""
        layer = self._layer(index)
        for number in range(len(self._sizes)):
            layer.observe = _of_batch(observe, number)
            states = self._get("hidden", index, number).requires_grad_()
            layer(states, *self._others(index, number)).backward(self._get("gradient", index + 1, number))
            self._put("gradient", index, number, _gradient(states))
            self._path("hidden", index, number).unlink()
            self._path("gradient", index + 1, number).unlink()

    def _layer(self, index: int) -> _ObservedLayer:
        rows = self._sizes[0][0]
        shape = LayerShape(self._checkpoint.facts.of_layer(index), "fp32", paths=1, rows=rows, rank=1, targets=())
        return _ObservedLayer(shape, dict(self._checkpoint.layers[index]))

    def _others(self, index: int, number: int) -> tuple[Tensor, ...]:
        """Returns what layer `index` takes beside the hidden states of a batch."""
        tables = self._tables[self._checkpoint.facts.kind(index)]
        rows, length, _ = self._sizes[number]
        return *self._vectors.vectors(index), *tables(length, rows)

    def _path(self, kind: str, index: int, number: int) -> Path:
        return self._directory / f"{kind}.{index}.{number}"

    def _put(self, kind: str, index: int, number: int, states: Tensor) -> None:
        self._path(kind, index, number).write_bytes(states.contiguous().numpy().data)

    def _get(self, kind: str, index: int, number: int) -> Tensor:
        values = np.fromfile(self._path(kind, index, number), np.float32)
        return torch.from_numpy(values).view(self._sizes[number])


def _gradient(states: Tensor) -> Tensor:
    gradient: Tensor = states.grad  # a backward pass has reached them
    return gradient


def _of_batch(observe: Observe | None, number: int) -> Callable[[Target, Tensor, Tensor], None]:
    if observe is None:
        return lambda target, x, y: None
    return lambda target, x, y: observe(number, target, x, y)


def _backbone(checkpoint: Checkpoint, *tables: str) -> Backbone:
    """Returns the backbone of a base with some of its tables. The others are empty."""
    empty = torch.empty(0)
    facts = checkpoint.facts
    present = {name: checkpoint.tables[name] if name in tables else empty for name in checkpoint.tables}
    return Backbone(
        facts,
        BackboneTensors(
            embedding=present["embedding"],
            embedding_scale=None,
            norms=checkpoint.norms,
            head_norms=checkpoint.head_norms,
            positions=present.get("positions"),
            lm_head=present.get("lm_head"),
            lm_head_scale=None,
        ),
        1,
    )
