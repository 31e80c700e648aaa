"""A base model's weights, from any supported checkpoint form, under one set of names.

Refuses by name whatever the decoder would not compute exactly. Knows nothing of recipes or programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.base import BaseFacts, locate_base
from server.compiler.gguf_form import gguf_checkpoint, gguf_facts
from server.compiler.hf_form import hf_checkpoint, hf_facts
from shared.errors import UnreadableCheckpoint
from shared.recipe import TARGETS, Target

LAYER_TENSORS = ("input_norm", "post_norm", *TARGETS)


@dataclass(frozen=True)
class Checkpoint:
    """Float32 weights: embedding (V, hidden), norms (2 layers + 1, hidden), layers' linear weights (out, in)."""

    facts: BaseFacts
    embedding: Tensor
    norms: Tensor  # two a layer (before attention, before the MLP), then the final one
    lm_head: Tensor | None  # None when tied to the embedding
    layers: tuple[dict[Target, Tensor], ...]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name in a program's graph."""
        named = {"trunk.embedding": self.embedding, "trunk.norms": self.norms}
        if self.lm_head is not None:
            named["trunk.lm_head"] = self.lm_head
        for index, layer in enumerate(self.layers):
            named.update({f"trunk.layers.{index}.{target}": weight for target, weight in layer.items()})
        return named


def inspect_base(source: str) -> BaseFacts:
    """The facts of the base model at `source`: a directory, a Hugging Face id, or a .gguf file.

    Raises UnknownBase, UnreadableCheckpoint, or UnsupportedModel naming the feature that is not supported.
    """
    files = locate_base(source)
    return gguf_facts(files) if files.form == "gguf" else hf_facts(files)


def load_checkpoint(source: str) -> Checkpoint:
    """The facts and every weight of the base model at `source`; raises as `inspect_base` does."""
    files = locate_base(source)
    facts, tensors = gguf_checkpoint(files) if files.form == "gguf" else hf_checkpoint(files)
    if facts.tied:
        tensors.pop("lm_head", None)  # some tied checkpoints carry a copy; the configuration decides
    _check_shapes(facts, tensors)
    norms = [tensors[f"layers.{index}.{name}"] for index in range(facts.layers) for name in ("input_norm", "post_norm")]
    return Checkpoint(
        facts=facts,
        embedding=tensors["embedding"],
        norms=torch.stack([*norms, tensors["norm"]]),
        lm_head=tensors.get("lm_head"),
        layers=tuple(
            {target: tensors[f"layers.{index}.{target}"] for target in TARGETS} for index in range(facts.layers)
        ),
    )


def tensor_shapes(facts: BaseFacts) -> dict[str, tuple[int, ...]]:
    """The canonical names and shapes that a base model with these facts has."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (facts.vocabulary, facts.hidden), "norm": (facts.hidden,)}
    if not facts.tied:
        shapes["lm_head"] = (facts.vocabulary, facts.hidden)
    for layer in range(facts.layers):
        for name in LAYER_TENSORS:
            if name.endswith("norm"):
                shapes[f"layers.{layer}.{name}"] = (facts.hidden,)
            else:
                in_features, out_features = facts.features(name)  # type: ignore[arg-type]
                shapes[f"layers.{layer}.{name}"] = (out_features, in_features)
    return shapes


def _check_shapes(facts: BaseFacts, tensors: dict[str, Tensor]) -> None:
    expected = tensor_shapes(facts)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UnreadableCheckpoint(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UnreadableCheckpoint(f"{name} has shape {tuple(tensors[name].shape)}; the configuration says {shape}")
