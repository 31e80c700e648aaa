"""Reads the facts of a base model from a Hugging Face config.json: supported architectures and their options.

It reads the option names of transformers 5 and 4. Unsupported options that change the arithmetic are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.compiler.checkpoints.base import Rope
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.recipe import TARGETS, Target

Options = Mapping[str, Any]

QKV: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")
ATTENTION: tuple[Target, ...] = (*QKV, "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
FULL, SLIDING = "full_attention", "sliding_attention"

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
CONTEXT = "max_position_embeddings"
COMMON: Options = {  # transformers' defaults for options that config.json omits
    "hidden_act": "silu",
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "layer_types": None,
    "sliding_window": None,
    "quantization_config": None,
}
ONLY: Mapping[str, tuple[Any, ...]] = {"original_max_position_embeddings": (None,), "quantization_config": (None,)}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True)
class Architecture:
    """The differences between a model_type and Llama. Options have Llama's names."""

    defaults: Options = field(default_factory=dict)  # override or extend COMMON
    spelling: Mapping[str, str] = field(default_factory=dict)  # name in config.json -> Llama's name
    facts: Mapping[str, Any] = field(default_factory=dict)  # fixed facts of this architecture
    biases: Mapping[str, tuple[Target, ...]] = field(
        default_factory=dict
    )  # option -> linear layers that it gives a bias
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # supported values of an option
    slides: Callable[[Options, int], bool] = lambda options, index: False  # whether a layer slides, without layer_types
    nested_rope: bool = False  # rope_parameters are nested by layer type


def _upper_layers(options: Options, index: int) -> bool:
    uses_window = options["use_sliding_window"] and options["sliding_window"] is not None
    return bool(uses_window and index >= options["max_window_layers"])


def _all_but_every_nth(options: Options, index: int) -> bool:
    return bool((index + 1) % options["sliding_window_pattern"])


_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        defaults={"attention_bias": False, "mlp_bias": False},
        biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        only={"sliding_window": (None,)},  # transformers' Llama has no sliding window
    ),
    "qwen2": Architecture(defaults=_QWEN, facts={"biases": QKV}, slides=_upper_layers),
    "qwen3": Architecture(
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
        facts={"qk_norm": True},
        biases={"attention_bias": ATTENTION},
        slides=_upper_layers,
    ),
    "opt": Architecture(
        defaults={
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
        },
        spelling={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        facts={"norm": "layer", "norm_eps": 1e-5, "gated": False, "rope": None},
        biases={"enable_bias": (*ATTENTION, "up_proj", "down_proj")},
        only={
            "do_layer_norm_before": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
    ),
    "gemma3_text": Architecture(
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        spelling={"hidden_activation": "hidden_act"},
        facts={"sandwich": True, "qk_norm": True},
        biases={"attention_bias": ATTENTION},
        only={"use_bidirectional_attention": (False, None)},
        slides=_all_but_every_nth,
        nested_rope=True,
    ),
}


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts in config.json, as fields of `BaseFacts`.

    Raises UnsupportedModel, naming the unsupported feature, and KeyError, TypeError or ValueError for a value that is
    missing or invalid.
    """
    model_type = config["model_type"]
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise UnsupportedModel(f"architecture {model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    options = _options(architecture, config)
    _refuse(model_type, architecture, options)
    hidden, heads, layers = (int(options[n]) for n in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = int(options["head_dim"] or hidden // heads)
    sliding = _sliding_layers(architecture, options, layers)
    biased = {target for option, targets in architecture.biases.items() if options[option] for target in targets}
    gemma = model_type == "gemma3_text"
    return {
        "architecture": model_type,
        "layers": layers,
        "hidden": hidden,
        "intermediate": options["intermediate_size"],
        "heads": heads,
        "kv_heads": options["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "vocabulary": options["vocab_size"],
        "context_length": options[CONTEXT],
        "tied": bool(options["tie_word_embeddings"]),
        "norm_eps": options["rms_norm_eps"],
        "biases": tuple(target for target in TARGETS if target in biased),
        "activation": ACTIVATIONS[options["hidden_act"]],
        "rope": _rope(model_type, architecture, options, FULL),
        "window": options["sliding_window"] if sliding else None,
        "sliding_layers": sliding,
        "sliding_rope": _rope(model_type, architecture, options, SLIDING) if sliding and gemma else None,
        "attention_scale": float(options["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        "attention_softcap": options.get("attn_logit_softcapping"),
        "final_softcap": options.get("final_logit_softcapping"),
        "embedding_scale": hidden**0.5 if gemma else 1.0,
        **architecture.facts,
    }


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
    usual = architecture.defaults.get("hidden_act", COMMON["hidden_act"])
    width = options.get("word_embed_proj_dim")
    features = {
        f"activation {options['hidden_act']!r}": options["hidden_act"] != usual,
        f"word_embed_proj_dim {width}": width not in (None, options["hidden_size"]),
        **{
            f"{name} {options[name]!r:.40}": options[name] not in values
            for name, values in {**ONLY, **architecture.only}.items()
        },
    }
    _unsupported(model_type, [name for name, present in features.items() if present])


def _unsupported(model_type: str, names: list[str]) -> None:
    if names:
        raise UnsupportedModel(
            f"this {model_type} checkpoint uses {', '.join(names)}, which the decoder does not compute"
        )


def _sliding_layers(architecture: Architecture, options: Options, layers: int) -> tuple[int, ...]:
    kinds = options["layer_types"]
    if kinds is None:
        kinds = [SLIDING if architecture.slides(options, index) else FULL for index in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise UnsupportedModel(
            f"layer_types lists {len(kinds)} of {layers} layers, with the kinds {sorted(set(kinds))}"
        )
    sliding = tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)
    if sliding and not (options.get("use_sliding_window", True) and options["sliding_window"]):
        raise UnreadableCheckpoint("config.json has sliding-window layers but no window size; set sliding_window")
    return sliding


def _rope(model_type: str, architecture: Architecture, options: Options, kind: str) -> Rope:
    """Returns the rotary embedding of one kind of layer, from `rope_parameters` or the options that preceded it."""
    rope_parameters, scaling = options["rope_parameters"] or {}, options["rope_scaling"] or {}
    if rope_parameters and (scaling or architecture.nested_rope != (rope_parameters.keys() <= {FULL, SLIDING})):
        raise UnreadableCheckpoint(f"config.json's rope_parameters do not match a {model_type} model")
    if kind == SLIDING:
        theta, scaling = options["rope_local_base_freq"], {}
    else:
        theta = options["rope_theta"]
    kind_parameters = (rope_parameters.get(kind) or {}) if architecture.nested_rope else rope_parameters
    outer = {"rope_theta": theta, "partial_rotary_factor": options["partial_rotary_factor"]}
    parameters = {**outer, **kind_parameters, **scaling}
    name = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters["partial_rotary_factor"]
    features = {
        f"RoPE scaling {name!r}": name not in ("default", "linear", "llama3"),
        f"partial rotary embedding {partial}": partial not in (None, 1),
    }
    _unsupported(model_type, [feature for feature, present in features.items() if present])
    scaled: dict[str, Any] = {} if name == "default" else {"factor": parameters["factor"]}
    if name == "llama3":
        scaled["low_freq_factor"] = parameters["low_freq_factor"]
        scaled["high_freq_factor"] = parameters["high_freq_factor"]
        scaled["original_context"] = parameters.get("original_max_position_embeddings") or options[CONTEXT]
    return Rope(theta=parameters["rope_theta"], kind=name, **scaled)
