"""Opens a base model's weights in any supported checkpoint format, under canonical names. Tensors are read when used.

Rejects, by name, any tensor or option that the decoder would not compute exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server.compiler.checkpoints.base import TEXT_FILES, BaseFacts, BaseFiles, locate_base, require_config
from server.compiler.checkpoints.gguf import gguf_checkpoint
from server.compiler.checkpoints.hf import config_only, hf_checkpoint
from server.compiler.checkpoints.hub import download
from server.compiler.checkpoints.lazy import LazyTensor, LazyTensors
from server.compiler.checkpoints.tokenizer import check_tokenizer
from shared.errors import UnreadableCheckpoint, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

CONFIGURATION = ("config.json", "tokenizer_config.json", "special_tokens_map.json", *TEXT_FILES)


@dataclass(frozen=True)
class Checkpoint:
    """Weights under canonical names, float32 when read. Only norms are in memory."""

    facts: BaseFacts
    tables: Mapping[str, Tensor]  # embedding (V, hidden); lm_head (V, hidden) unless tied; positions if learned
    norms: Tensor  # (K layers + F, hidden): each layer's `layer_norms`, then `final_norms`
    head_norms: Tensor | None  # (`mixer_rows` of each layer, the widest one's size): each layer's `mixer_vectors`
    layers: tuple[Mapping[str, Tensor], ...]  # linear weights (out, in) and biases (out,) by name


def inspect_base(source: str) -> BaseFacts:
    """Returns the facts of the base model at `source`: a directory, a Hugging Face id, or a .gguf file.

    Raises UnknownBase, UnreadableCheckpoint if files or tensors are missing, truncated or of another shape or type, or
    UnsupportedModel naming the feature that is not supported.
    """
    files = locate_base(source)
    return hashed(open_checkpoint(files)[0], files)


def inspect_headers(source: str) -> tuple[BaseFacts, BaseFiles]:
    """Returns the facts of the base model at `source` and the files that they were read from, without any weight.

    The digest is not computed, and torch is not imported. Of a Hugging Face id only the configuration is downloaded,
    and its tensors are taken to be those that the configuration requires. Raises the errors of `inspect_base`.
    """
    if Path(source).exists():
        files = locate_base(source)
        return check_headers(files), files
    directory = download(source, CONFIGURATION)
    require_config(source, directory)
    facts = config_only(directory)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(facts).values())
    return facts.model_copy(update={"parameters": parameters}), BaseFiles("huggingface", directory, ())


def load_checkpoint(source: str) -> Checkpoint:
    """Returns the facts and the weights of the base model at `source`. Raises the errors of `inspect_base`.

    Names, shapes and types of all tensors are checked here; tables and layers are read from the files when used.
    """
    import torch

    files = locate_base(source)
    unhashed_facts, tensors = open_checkpoint(files)
    facts = hashed(unhashed_facts, files)
    prefixes = [f"layers.{index}." for index in range(facts.layers)]
    vectors = [tensors[prefix + name].read() for prefix in prefixes for name in facts.layer_norms]
    kinds, mixer_rows = facts.of_layers(), facts.mixer_rows
    heads: list[Tensor] = []
    for prefix, kind in zip(prefixes, kinds, strict=True):
        own = [tensors[prefix + name].read() for name in kind.mixer_vectors]
        heads += [*own, *[torch.zeros(1)] * (mixer_rows - len(own))]
    widest = max((len(vector) for vector in heads), default=0)
    heads = [torch.nn.functional.pad(vector, (0, widest - len(vector))) for vector in heads]
    return Checkpoint(
        facts=facts,
        tables=LazyTensors({name: tensors[name] for name in ("embedding", "lm_head", "positions") if name in tensors}),
        norms=torch.stack([*vectors, *(tensors[name].read() for name in facts.final_norms)]),
        head_norms=torch.stack(heads) if heads else None,
        layers=tuple(
            LazyTensors({name: tensors[prefix + name] for name in linear_shapes(kind)})
            for prefix, kind in zip(prefixes, kinds, strict=True)
        ),
    )


def check_headers(files: BaseFiles) -> BaseFacts:
    """Returns the facts by the configuration and the headers of the files alone, within a second.

    Where the configuration says that lm_head is the embedding table, a second table is taken to be a copy. Raises the
    errors of `inspect_base`, and those of a base without a tokenizer that can be used.
    """
    facts, _ = open_checkpoint(files, compare_tables=False)
    check_tokenizer(files)
    return facts


def open_checkpoint(files: BaseFiles, *, compare_tables: bool = True) -> tuple[BaseFacts, dict[str, LazyTensor]]:
    """Returns the facts, without the digest of the files, and every tensor by canonical name, checked.

    compare_tables: read both tables of a base that ties them and has two. Raises the errors of `inspect_base`.
    """
    facts, tensors = gguf_checkpoint(files) if files.form == "gguf" else hf_checkpoint(files, compare_tables)
    _check_shapes(facts, tensors)
    return facts, tensors


def hashed(facts: BaseFacts, files: BaseFiles) -> BaseFacts:
    """Returns the facts with the digest of the files, which takes seconds for large ones."""
    return facts.model_copy(update={"sha256": files.sha256})


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
    if facts.learned_positions:
        shapes["positions"] = (facts.context_length, facts.hidden)
    shapes.update(dict.fromkeys(facts.final_norms, (facts.hidden,)))
    norms = dict.fromkeys(facts.layer_norms, (facts.hidden,))
    for index, kind in enumerate(facts.of_layers()):
        layer = {**norms, **{name: (size,) for name, size in kind.mixer_vectors.items()}, **linear_shapes(kind)}
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _check_shapes(facts: BaseFacts, tensors: Mapping[str, LazyTensor]) -> None:
    expected = tensor_shapes(facts)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise UnreadableCheckpoint(
            f"the checkpoint lacks {len(missing)} tensors; the first is {missing[0]}; copy or download all weight files"
        )
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise UnsupportedModel(
            f"the configuration does not use {len(unknown)} tensors of the checkpoint; the first is {unknown[0]}; "
            "use the weights and the configuration of one model"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UnreadableCheckpoint(
                f"{name} has shape {tensors[name].shape}; the configuration requires {shape}; use the weights and the "
                "configuration of one model"
            )
