"""Loads a base model's weights from any supported checkpoint format, under canonical names.

Rejects, by name, any tensor or option that the decoder would not compute exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts, locate_base
from server.compiler.checkpoints.gguf import gguf_checkpoint, gguf_facts
from server.compiler.checkpoints.hf import hf_checkpoint, hf_facts
from shared.errors import UnreadableCheckpoint, UnsupportedModel


@dataclass(frozen=True)
class Checkpoint:
    """Float32 weights under canonical names."""

    facts: BaseFacts
    tables: dict[str, Tensor]  # embedding (V, hidden); lm_head (V, hidden) unless tied; positions if learned
    norms: Tensor  # (K layers + F, hidden): each layer's `layer_norms`, then `final_norms`
    head_norms: Tensor | None  # (2 layers, head_dim)
    layers: tuple[dict[str, Tensor], ...]  # linear weights (out, in) and biases (out,) by name


def inspect_base(source: str) -> BaseFacts:
    """Returns the facts of the base model at `source`: a directory, a Hugging Face id, or a .gguf file.

    Raises UnknownBase, UnreadableCheckpoint, or UnsupportedModel naming the feature that is not supported.
    """
    files = locate_base(source)
    return gguf_facts(files) if files.form == "gguf" else hf_facts(files)


def load_checkpoint(source: str) -> Checkpoint:
    """Returns the facts and all weights of the base model at `source`. Raises the errors of `inspect_base`."""
    files = locate_base(source)
    facts, tensors = gguf_checkpoint(files) if files.form == "gguf" else hf_checkpoint(files)
    if facts.tied:
        tensors.pop("lm_head", None)  # some tied checkpoints contain a copy; the configuration takes precedence
    _check_shapes(facts, tensors)
    vectors = [tensors[f"layers.{index}.{name}"] for index in range(facts.layers) for name in facts.layer_norms]
    heads = [tensors[f"layers.{index}.{name}"] for index in range(facts.layers) for name in facts.head_norms]
    return Checkpoint(
        facts=facts,
        tables={name: tensors[name] for name in ("embedding", "lm_head", "positions") if name in tensors},
        norms=torch.stack([*vectors, *(tensors[name] for name in facts.final_norms)]),
        head_norms=torch.stack(heads) if heads else None,
        layers=tuple(
            {name: tensors[f"layers.{index}.{name}"] for name in linear_shapes(facts)} for index in range(facts.layers)
        ),
    )


def linear_shapes(facts: BaseFacts) -> dict[str, tuple[int, ...]]:
    """Returns the linear weights and biases of one decoder layer with their shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in facts.linears:
        in_features, out_features = facts.features(target)
        shapes[target] = (out_features, in_features)
        if target in facts.biases:
            shapes[f"{target}_bias"] = (out_features,)
    return shapes


def tensor_shapes(facts: BaseFacts) -> dict[str, tuple[int, ...]]:
    """Returns the canonical tensor names and shapes of a base model with these facts."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (facts.vocabulary, facts.hidden)}
    if not facts.tied:
        shapes["lm_head"] = (facts.vocabulary, facts.hidden)
    if facts.rope is None:
        shapes["positions"] = (facts.context_length, facts.hidden)
    shapes.update(dict.fromkeys(facts.final_norms, (facts.hidden,)))
    layer = dict.fromkeys(facts.layer_norms, (facts.hidden,))
    layer.update(dict.fromkeys(facts.head_norms, (facts.head_dim,)))
    for index in range(facts.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in {**layer, **linear_shapes(facts)}.items()})
    return shapes


def _check_shapes(facts: BaseFacts, tensors: dict[str, Tensor]) -> None:
    expected = tensor_shapes(facts)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UnreadableCheckpoint(f"the checkpoint lacks {len(missing)} tensors; the first is {missing[0]}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise UnsupportedModel(
            f"the configuration does not use {len(unknown)} tensors of the checkpoint; the first is {unknown[0]}"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UnreadableCheckpoint(
                f"{name} has shape {tuple(tensors[name].shape)}; the configuration requires {shape}"
            )
