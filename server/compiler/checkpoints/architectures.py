"""The supported architectures: a table of the differences between a model_type and Llama.

Adding a family is one entry. `hf_config` reads a config.json by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shared.errors import UnsupportedModel
from shared.recipe import Target

Options = Mapping[str, Any]

QKV: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")
ATTENTION: tuple[Target, ...] = (*QKV, "o_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
PLAIN_MLP: tuple[Target, ...] = ("up_proj", "down_proj")  # without a gate
FULL, SLIDING, CONVOLUTION = "full_attention", "sliding_attention", "conv"

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
    "quantization": None,  # MLX's name of it
    "compression_config": None,  # an older name of it
    "use_sliding_window": True,
}
ANY: tuple[Any, ...] = ("any value",)  # of an option that is always supported
ONLY: Mapping[str, tuple[Any, ...]] = {"original_max_position_embeddings": (None,)}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

PRE_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
POST_NORMS = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}
GEMMA_NORMS = {**POST_NORMS, "input_layernorm": "input_norm", "pre_feedforward_layernorm": "post_norm"}
HEAD_NORMS = {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"}


def _nothing(options: Options) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """The differences between a model_type and Llama. Options have Llama's names."""

    models: str = ""  # well-known ones
    defaults: Options = field(default_factory=dict)  # override or extend COMMON
    spelling: Mapping[str, str] = field(default_factory=dict)  # name in config.json -> Llama's name
    facts: Mapping[str, Any] = field(default_factory=dict)  # fixed facts of this architecture
    derived: Callable[[Options], dict[str, Any]] = _nothing  # facts that depend on options
    biases: Mapping[str, tuple[Target, ...]] = field(
        default_factory=dict
    )  # option -> linear layers that it gives a bias
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # supported values of an option
    slides: Callable[[Options, int], bool] = lambda options, index: False  # whether a layer slides, without layer_types
    rotates: Callable[[Options, int, bool], bool] = lambda options, index, slides: True  # whether a layer has RoPE
    nested_rope: bool = False  # rope_parameters are nested by layer type
    rotary_share: float | None = None  # default of partial_rotary_factor; None: heads are always rotated as a whole
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)  # name within a layer -> canonical name
    norm_offset: float = 0.0  # norms multiply by the stored weight plus this
    norm_biases: bool = True  # layer norms have a bias in the files
    unused_positions: int = 0  # unused leading rows of the position table
    transposed: bool = False  # linear weights are stored (in, out)
    equal_heads: bool = False  # as many key-value heads as heads


def _upper_layers(options: Options, index: int) -> bool:
    uses_window = options["use_sliding_window"] and options["sliding_window"] is not None
    return bool(uses_window and index >= options["max_window_layers"])


def _all_but_every_nth(options: Options, index: int) -> bool:
    pattern = options["sliding_window_pattern"]
    return bool(options["sliding_window"] and pattern and (index + 1) % pattern)


def _every_layer(options: Options, index: int) -> bool:
    return options["sliding_window"] is not None


def _sliding_or_all(options: Options, index: int, slides: bool) -> bool:
    return slides or options["sliding_window"] is None


def _most_layers(options: Options, index: int, slides: bool) -> bool:
    chosen = options["no_rope_layers"]
    return bool((index + 1) % options["no_rope_layer_interval"] if chosen is None else chosen[index])


def _gemma(options: Options) -> dict[str, Any]:
    caps = {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"}
    return {
        "embedding_scale": options["hidden_size"] ** 0.5,
        "attention_scale": float(options["query_pre_attn_scalar"] or options["head_dim"]) ** -0.5,
        **{fact: options[option] for fact, option in caps.items()},
    }


def _within_original_context(options: Options) -> dict[str, Any]:
    """Beyond its original context, Ministral 3 scales queries by their position, which the decoder does not compute."""
    scaling = options["rope_parameters"] or options["rope_scaling"] or {}
    original = scaling.get("original_max_position_embeddings") or options[CONTEXT]
    return {"context_length": min(original, options[CONTEXT])}


def _granite(options: Options) -> dict[str, Any]:
    return {
        "embedding_scale": options["embedding_multiplier"],
        "attention_scale": options["attention_multiplier"],
        "residual_scale": options["residual_multiplier"],
        "logits_scale": 1 / options["logits_scaling"],
    }


def _lfm2(options: Options) -> dict[str, Any]:
    kinds, attends = options["layer_types"], options["full_attn_idxs"]
    if kinds is None:
        layers = range(options["num_hidden_layers"])
        kinds = [FULL if attends is None or index in attends else CONVOLUTION for index in layers]
    width, multiple = options["block_ff_dim"] or options["intermediate_size"], options["block_multiple_of"]
    if options["block_auto_adjust_ff_dim"]:
        scaled = int(2 * width / 3)
        if options["block_ffn_dim_multiplier"] is not None:
            scaled = int(options["block_ffn_dim_multiplier"] * scaled)
            scaled = multiple * ((scaled + multiple - 1) // multiple)
        width = scaled
    tied = options["tie_word_embeddings"] if options["tie_embedding"] is None else options["tie_embedding"]
    return {
        "conv_layers": tuple(index for index, kind in enumerate(kinds) if kind == CONVOLUTION),
        "conv_taps": options["conv_L_cache"],
        "intermediate": width,
        "tied": bool(tied),
    }


_QWEN = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = Architecture(
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": False,
    },
    spelling={"hidden_activation": "hidden_act"},
    derived=_gemma,
    biases={"attention_bias": ATTENTION},
    only={"use_bidirectional_attention": (False, None)},
    slides=_all_but_every_nth,
    norms=GEMMA_NORMS,
    norm_offset=1.0,
)
_GEMMA3 = replace(
    _GEMMA,
    defaults={
        **_GEMMA.defaults,
        "num_attention_heads": 8,  # multimodal models leave out sizes, too
        "vocab_size": 262208,
        CONTEXT: 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    facts={"qk_norm": "head"},
    norms={**GEMMA_NORMS, **HEAD_NORMS},
    nested_rope=True,
)
_MISTRAL = Architecture(
    defaults={"num_key_value_heads": 8, "sliding_window": 4096}, slides=_every_layer, only={"layer_types": (None,)}
)
_OLMO2 = Architecture(
    defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
    facts={"qk_norm": "width"},
    biases={"attention_bias": ATTENTION},
    norms={**POST_NORMS, **HEAD_NORMS},
)
_COHERE = Architecture(
    defaults={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    },
    spelling={"layer_norm_eps": "rms_norm_eps"},
    facts={"norm": "layer", "parallel": True, "interleaved": True},
    derived=lambda options: {"logits_scale": options["logit_scale"]},
    biases={"attention_bias": ATTENTION},
    only={"use_qk_norm": (False, None)},
    norms={"input_layernorm": "input_norm"},
    norm_biases=False,
)
_GLM = Architecture(
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    facts={"interleaved": True},
    biases={"attention_bias": QKV},
    rotary_share=0.5,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        models="Llama 2, 3.1, 3.2, TinyLlama, SmolLM, SmolLM2, Falcon 3",
        defaults={"attention_bias": False, "mlp_bias": False},
        biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        only={"sliding_window": (None,)},  # transformers' Llama has no sliding window
    ),
    "mistral": replace(_MISTRAL, models="Mistral 7B"),
    "ministral": replace(_MISTRAL, models="Ministral 8B", only={}),
    "ministral3": replace(
        _MISTRAL,
        models="Ministral 3, its text model",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        derived=_within_original_context,
    ),
    "qwen2": Architecture(models="Qwen2, Qwen2.5", defaults=_QWEN, facts={"biases": QKV}, slides=_upper_layers),
    "qwen3": Architecture(
        models="Qwen3 (dense)",
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
        facts={"qk_norm": "head"},
        biases={"attention_bias": ATTENTION},
        slides=_upper_layers,
        norms={**PRE_NORMS, **HEAD_NORMS},
    ),
    "gemma": replace(
        _GEMMA,
        models="Gemma",
        defaults={
            **_GEMMA.defaults,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": None,
            "sliding_window": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        spelling={},
        derived=lambda options: (
            _gemma(options) | ({"activation": "gelu_tanh"} if options["hidden_act"] == "gelu" else {})
        ),
        norms=PRE_NORMS,
    ),
    "gemma2": replace(_GEMMA, models="Gemma 2"),
    "gemma3_text": replace(_GEMMA3, models="Gemma 3 270M, 1B"),
    "phi3": Architecture(
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        defaults={"rms_norm_eps": 1e-5, CONTEXT: 4096, "original_max_position_embeddings": 4096},
        only={"original_max_position_embeddings": ANY},
        slides=_every_layer,
        rotary_share=1.0,
    ),
    "smollm3": Architecture(
        models="SmolLM3",
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
        },
        biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
        slides=lambda options, index: bool(
            options["use_sliding_window"] and options["sliding_window"] and not _most_layers(options, index, False)
        ),
        rotates=_most_layers,
    ),
    "granite": Architecture(
        models="Granite 3 (dense)",
        defaults={
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        derived=_granite,
        biases={"attention_bias": ATTENTION, "mlp_bias": MLP},
    ),
    "arcee": Architecture(
        models="AFM 4.5B",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        facts={"gated": False},
        biases={"attention_bias": ATTENTION, "mlp_bias": PLAIN_MLP},
    ),
    "ernie4_5": Architecture(
        models="ERNIE 4.5 0.3B",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        facts={"interleaved": True},
        biases={"use_bias": (*ATTENTION, *MLP)},
    ),
    "hunyuan_v1_dense": Architecture(
        models="Hunyuan 0.5B to 7B",
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False},
        facts={"qk_norm": "head", "qk_norm_after_rope": True},
        biases={"attention_bias": ATTENTION},
        norms={**PRE_NORMS, "self_attn.query_layernorm": "q_norm", "self_attn.key_layernorm": "k_norm"},
    ),
    "seed_oss": Architecture(
        models="Seed-OSS",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        biases={"attention_bias": QKV, "attention_out_bias": ("o_proj",), "mlp_bias": MLP},
    ),
    "exaone4": Architecture(
        models="EXAONE 4",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        facts={"qk_norm": "head"},
        slides=_all_but_every_nth,
        rotates=_sliding_or_all,
        norms={**POST_NORMS, **HEAD_NORMS},
    ),
    "olmo2": replace(_OLMO2, models="OLMo 2"),
    "olmo3": replace(
        _OLMO2,
        models="OLMo 3",
        defaults={
            **_OLMO2.defaults,
            "rope_theta": 5e5,
            "rope_local_base_freq": None,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        slides=_all_but_every_nth,
        nested_rope=True,
    ),
    "stablelm": Architecture(
        models="StableLM 2, StableLM 3B",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
        },
        spelling={"layer_norm_eps": "rms_norm_eps"},
        facts={"norm": "layer"},
        derived=lambda options: (
            {"parallel": True, "norms": ("input_norm",)} if options["use_parallel_residual"] else {}
        ),
        biases={"use_qkv_bias": QKV},
        only={"qk_layernorm": (False,)},
        rotary_share=0.25,
    ),
    "gpt_neox": Architecture(
        models="Pythia, GPT-NeoX",
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True},
        spelling={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
        facts={"norm": "layer", "gated": False},
        derived=lambda options: {
            "parallel": options["use_parallel_residual"],
            "biases": (*(ATTENTION if options["attention_bias"] else ()), *PLAIN_MLP),
        },
        rotary_share=0.25,
        equal_heads=True,
    ),
    "starcoder2": Architecture(
        models="StarCoder2",
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        spelling={"norm_epsilon": "rms_norm_eps"},
        facts={"norm": "layer", "gated": False},
        biases={"use_bias": (*ATTENTION, *PLAIN_MLP)},
        slides=_every_layer,
    ),
    "cohere": replace(_COHERE, models="Command R, Aya 23", defaults={**_COHERE.defaults, "rope_theta": 5e5}),
    "cohere2": replace(
        _COHERE,
        models="Command R7B",
        defaults={**_COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4},
        slides=_all_but_every_nth,
        rotates=lambda options, index, slides: slides,
    ),
    "glm": replace(_GLM, models="GLM-4 9B"),
    "glm4": replace(
        _GLM,
        models="GLM-4-0414",
        norms={
            **PRE_NORMS,
            "post_self_attn_layernorm": "attention_out_norm",
            "post_mlp_layernorm": "mlp_out_norm",
        },
    ),
    "nemotron": Architecture(
        models="Nemotron, Minitron",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        spelling={"norm_eps": "rms_norm_eps"},
        facts={"norm": "layer", "gated": False},
        biases={"attention_bias": ATTENTION, "mlp_bias": PLAIN_MLP},
        rotary_share=0.5,
        norm_offset=1.0,
    ),
    "helium": Architecture(
        models="Helium 1",
        defaults={
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
            "attention_bias": False,
            "mlp_bias": False,
        },
        facts={"interleaved": True},
        biases={"attention_bias": QKV, "mlp_bias": MLP},
    ),
    "lfm2": Architecture(
        models="LFM2, LFM2.5 (dense)",
        defaults={
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "full_attn_idxs": None,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            # Names in older files, which have precedence:
            "block_ff_dim": None,
            "tie_embedding": None,
        },
        spelling={"norm_eps": "rms_norm_eps"},
        facts={"qk_norm": "head"},
        derived=_lfm2,
        only={"conv_bias": (False,)},
        norms={
            "operator_norm": "input_norm",
            "ffn_norm": "post_norm",
            "self_attn.q_layernorm": "q_norm",
            "self_attn.k_layernorm": "k_norm",
        },
    ),
    "opt": Architecture(
        models="OPT, except 350M",
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
        facts={"norm": "layer", "norm_eps": 1e-5, "gated": False, "learned_positions": True},
        biases={"enable_bias": (*ATTENTION, *PLAIN_MLP)},
        only={
            "do_layer_norm_before": (True,),
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
        norms={"self_attn_layer_norm": "input_norm", "final_layer_norm": "post_norm"},
        unused_positions=2,
        equal_heads=True,
    ),
    "gpt2": Architecture(
        models="GPT-2, DistilGPT2",
        defaults={
            "hidden_act": "gelu_new",
            "intermediate_size": None,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        spelling={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": CONTEXT,
            "n_inner": "intermediate_size",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        facts={
            "norm": "layer",
            "gated": False,
            "learned_positions": True,
            "biases": (*ATTENTION, *PLAIN_MLP),
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        norms={"ln_1": "input_norm", "ln_2": "post_norm"},
        transposed=True,
        equal_heads=True,
    ),
}
USUAL = ("qwen3", "smollm3", "granite", "llama")  # for models whose family has no supported member
UNQUANTIZED = "use the model's checkpoint in BF16 or F16, or a GGUF file of it"
# Models with other parts besides text, and the model_type whose tensor names their text model has.
MULTIMODAL: Mapping[str, str] = {"gemma3": "gemma3_text", "mistral3": "mistral"}


def architecture_of(model_type: str) -> Architecture:
    """Returns the architecture of a supported model_type, or of its text model."""
    return ARCHITECTURES[MULTIMODAL.get(model_type, model_type)]


def check_supported(model_type: str, names: list[str]) -> None:
    """Raises UnsupportedModel for features that a checkpoint uses and the decoder does not compute."""
    if names:
        raise UnsupportedModel(
            f"this {model_type} checkpoint uses {', '.join(names)}, which the decoder does not compute"
        )
