"""Reads the facts of a base model from a Hugging Face config.json, by the table of architectures.

It reads the option names of transformers 5 and 4. Unsupported options that change the arithmetic are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, get_args

from server.compiler.checkpoints.architectures import (
    ACTIVATIONS,
    ANY,
    ARCHITECTURES,
    COMMON,
    CONTEXT,
    CONVOLUTION,
    FULL,
    MULTIMODAL,
    ONLY,
    SIZES,
    SLIDING,
    UNQUANTIZED,
    USUAL,
    Architecture,
    Options,
    check_supported,
)
from server.compiler.checkpoints.base import AttentionKind, NormPlace
from server.compiler.checkpoints.rotary import read_rope, rotary_width
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.recipe import TARGETS

MAX_LAYERS = 1000
QUANTIZATIONS = ("quantization_config", "quantization", "compression_config")


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts in config.json, as fields of `BaseFacts`.

    Raises UnsupportedModel, naming the unsupported feature, and KeyError, TypeError or ValueError for a value that is
    missing or invalid.
    """
    model_type = config["model_type"]
    if model_type in MULTIMODAL:
        outer = ("tie_word_embeddings", "quantization_config")
        text = {"model_type": MULTIMODAL[model_type], **config["text_config"]}
        inherited = {name: config[name] for name in outer if name in config}
        return {**config_facts({**text, **inherited}), "architecture": model_type}
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise UnsupportedModel(_unknown(config))
    options = _options(architecture, config)
    _refuse(model_type, architecture, options)
    hidden, heads, layers = (int(options[n]) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"{layers} layers; at most {MAX_LAYERS:,} are supported")
    kv_heads = heads if architecture.equal_heads else int(options["num_key_value_heads"] or heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key-value heads")
    head_dim = int(options["head_dim"] or hidden // heads)
    biased = {target for option, targets in architecture.biases.items() if options[option] for target in targets}
    rotary_dim = rotary_width(model_type, architecture, options, head_dim)
    return {
        "architecture": model_type,
        "layers": layers,
        "hidden": hidden,
        "intermediate": options["intermediate_size"] or 4 * hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocabulary": options["vocab_size"],
        "context_length": options[CONTEXT],
        "rotary_dim": rotary_dim if rotary_dim < head_dim else None,
        "tied": bool(options["tie_word_embeddings"]),
        "norm_eps": options["rms_norm_eps"],
        "norms": tuple(name for name in get_args(NormPlace) if name in architecture.norms.values()),
        "biases": tuple(target for target in TARGETS if target in biased),
        "activation": ACTIVATIONS[options["hidden_act"]],
        **_attention(model_type, architecture, options, rotary_dim),
        "attention_scale": float(head_dim) ** -0.5,
        **architecture.facts,
        **architecture.derived(options),
    }


def _unknown(config: Mapping[str, Any]) -> str:
    """Returns why a model_type is not supported, and what is."""
    model_type, names = str(config["model_type"]), [*ARCHITECTURES, *MULTIMODAL]
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    text_type = str(text.get("model_type", model_type))
    used = [str(name) for name, value in (*config.items(), *text.items()) if value]
    options = " ".join([model_type, text_type, *used])
    kinds = {
        "a mixture of experts": ("moe", "expert", "mixtral"),
        "a model with state-space, recurrent or convolution layers": (
            *("mamba", "ssm", "rwkv", "linear_attention", "linear_num", "conv_L_cache"),
        ),
        f"a multimodal model, whose text model is {text_type!r}": ("vision_config", "audio_config"),
        "an encoder or an encoder-decoder model": ("encoder", "bert", "t5", "bart", "whisper"),
    }
    kind = next((kind for kind, words in kinds.items() if any(word in options for word in words)), None)
    why = f"architecture {model_type!r} is not supported" + (f": it is {kind}" if kind else "")
    if "auto_map" in config:
        why += "; code in a checkpoint (auto_map) is never executed"
    family = re.match("[a-z]*", text_type)
    related = family is not None and family[0] not in ("", "gpt")  # GPT is what many unrelated models are called
    relatives = [name for name in names if family and related and name.startswith(family[0])]
    nearest = sorted(relatives, key=lambda name: -_same_letters(name, text_type))
    nearest = nearest or sorted(USUAL, key=lambda name: not text_type.startswith(name))
    return f"{why}; the nearest supported: {', '.join(nearest)}; all supported: {', '.join(names)}"


def _same_letters(name: str, other: str) -> int:
    """Returns how many letters at the beginning of two names are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))))


def _options(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the architecture's options by Llama's names. Other entries are unused, as in transformers."""
    defaults = {**COMMON, **architecture.defaults}
    own = {
        architecture.spelling.get(name, name): value
        for name, value in config.items()
        if name not in architecture.spelling.values()
    }
    return {**defaults, **{name: value for name, value in own.items() if name in {*defaults, *SIZES, CONTEXT}}}


def _refuse(model_type: str, architecture: Architecture, options: Options) -> None:
    if name := next((name for name in QUANTIZATIONS if options[name]), None):
        quantization = options[name]
        method = quantization.get("quant_method", "an unnamed method") if isinstance(quantization, dict) else "?"
        raise UnsupportedModel(f"this {model_type} checkpoint is quantized by {method!s:.40} ({name}); {UNQUANTIZED}")
    width = options.get("word_embed_proj_dim")
    features = {
        f"activation {options['hidden_act']!r}": options["hidden_act"] not in ACTIVATIONS,
        f"word_embed_proj_dim {width}": width not in (None, options["hidden_size"]),
        **{
            f"{name} {options[name]!r:.40}": options[name] not in values
            for name, values in {**ONLY, **architecture.only}.items()
            if values is not ANY
        },
    }
    check_supported(model_type, [name for name, present in features.items() if present])


def _attention(model_type: str, architecture: Architecture, options: Options, rotary_dim: int) -> dict[str, Any]:
    """Returns the kinds of attention, and each layer's. Layers that see everything and are rotated come first."""
    layers, window = int(options["num_hidden_layers"]), options["sliding_window"]
    sliding = _sliding_layers(architecture, options, layers)
    if window and window >= options[CONTEXT]:
        window = None  # no text is longer than it
    by_layer = [(index in sliding, architecture.rotates(options, index, index in sliding)) for index in range(layers)]
    kinds = sorted(set(by_layer), key=lambda kind: (kind[0], not kind[1]))
    learned = architecture.facts.get("learned_positions", False)
    attention = tuple(
        AttentionKind(
            rope=read_rope(model_type, architecture, options, SLIDING if slides else FULL, rotary_dim)
            if rotates and not learned
            else None,
            window=window if slides else None,
        )
        for slides, rotates in kinds
    )
    layer_kinds = tuple(kinds.index(kind) for kind in by_layer) if len(kinds) > 1 else ()
    return {"attention": attention, "layer_kinds": layer_kinds}


def _sliding_layers(architecture: Architecture, options: Options, layers: int) -> tuple[int, ...]:
    kinds = options["layer_types"]
    if kinds is None:
        kinds = [SLIDING if architecture.slides(options, index) else FULL for index in range(layers)]
    known = {FULL, SLIDING, CONVOLUTION} if "conv_L_cache" in options else {FULL, SLIDING}
    if len(kinds) != layers or not set(kinds) <= known:
        raise UnsupportedModel(
            f"layer_types lists {len(kinds)} of {layers} layers, with the kinds {sorted(set(kinds))}"
        )
    sliding = tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)
    if sliding and not (options["use_sliding_window"] and options["sliding_window"]):
        raise UnreadableCheckpoint("config.json has sliding-window layers but no window size; set sliding_window")
    return sliding
