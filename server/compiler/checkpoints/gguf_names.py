"""How llama.cpp holds each architecture in a GGUF file: its name, its metadata, the tensors' names, the order of rows.

Source: llama.cpp's `convert_hf_to_gguf.py` and the tensor names of its `gguf` package. Norms that multiply by
1 + weight (Gemma, Nemotron) are stored with their one added, which is also their canonical form here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.compiler.checkpoints.architectures import CONTEXT, QKV
from shared.recipe import Target
from shared.zo.lora import BaseShape, head_order

TOP_NAMES: Mapping[str, str] = {
    "token_embd": "embedding",
    "position_embd": "positions",
    "output_norm": "norm",
    "token_embd_norm": "norm",  # LFM2's name of it
    "output": "lm_head",
}
LINEARS: Mapping[str, tuple[Target, ...]] = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": QKV,
    "attn_output": ("o_proj",),
    "ffn_gate": ("gate_proj",),
    "ffn_up": ("up_proj",),
    "ffn_down": ("down_proj",),
}
CONVOLUTION_LINEARS: Mapping[str, tuple[Target, ...]] = {  # of a layer that has a convolution
    "shortconv.in_proj": ("k_proj", "q_proj", "v_proj"),
    "shortconv.out_proj": ("o_proj",),
}
CONVOLUTION_KERNEL = "shortconv.conv"  # (hidden, taps)
GATE_UP: tuple[Target, ...] = ("gate_proj", "up_proj")  # in `ffn_up`, where a gated MLP has no `ffn_gate`
NORMS: Mapping[str, str] = {
    "attn_norm": "input_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "post_norm",
    "post_ffw_norm": "mlp_out_norm",
}
# llama.cpp's name of an option, after that of the architecture -> Llama's in config.json
SIZES: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": CONTEXT,
    "attention.head_count": "num_attention_heads",
}
ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
KV_HEADS = "attention.head_count_kv"  # of a file or of each layer; layers with a convolution have none
TAPS = "shortconv.l_cache"
PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
# Factors of the arithmetic, which change nothing if they are 0 or 1.
FACTORS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture as llama.cpp holds it."""

    name: str  # in `general.architecture`, and before the names of its metadata
    model_type: str  # in transformers
    sliding_type: str = ""  # that of a file that has an attention window, if that is another one
    permuted: bool = False  # rows of a query or key head that rotate together are neighbours instead of halves
    options: Mapping[str, str] = field(default_factory=dict)  # as SIZES: further options
    computed: Mapping[str, Any] = field(default_factory=dict)  # options that the converter has applied
    linears: Mapping[str, tuple[Target, ...]] = field(default_factory=lambda: LINEARS)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)  # llama.cpp's name -> canonical name
    sliding_theta: float = 0.0  # RoPE's base of sliding layers in a file that does not name it; 0: that of the others
    window: int = 0  # attention window of sliding layers in a file that does not name it; 0: no layer slides
    mean_width_layers: int = 0  # of Gemma's one size whose attention scores are scaled by the mean width of a head


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    form.name: form
    for form in (
        GgufArchitecture("llama", "llama", permuted=True),
        GgufArchitecture("mistral3", "ministral3", permuted=True),
        GgufArchitecture("qwen2", "qwen2"),
        GgufArchitecture("qwen3", "qwen3"),
        GgufArchitecture("gemma", "gemma"),
        GgufArchitecture("gemma2", "gemma2", options=SOFTCAPS, window=4096, mean_width_layers=46),
        GgufArchitecture("gemma3", "gemma3_text", sliding_theta=10000.0, mean_width_layers=62),
        GgufArchitecture("phi3", "phi3"),
        GgufArchitecture("smollm3", "smollm3", permuted=True),
        GgufArchitecture(
            "granite",
            "granite",
            permuted=True,
            options={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
        ),
        GgufArchitecture("arcee", "arcee", permuted=True),
        GgufArchitecture("ernie4_5", "ernie4_5"),
        GgufArchitecture("hunyuan-dense", "hunyuan_v1_dense"),
        GgufArchitecture("seed_oss", "seed_oss", norms={**NORMS, "post_attention_norm": "post_norm"}),
        GgufArchitecture("exaone4", "exaone4"),
        GgufArchitecture("olmo2", "olmo2", sliding_type="olmo3"),
        GgufArchitecture("stablelm", "stablelm", options=PARALLEL),
        GgufArchitecture("gptneox", "gpt_neox", options=PARALLEL),
        GgufArchitecture("starcoder2", "starcoder2"),
        GgufArchitecture("command-r", "cohere", options={"logit_scale": "logit_scale"}),
        GgufArchitecture("cohere2", "cohere2", options={"logit_scale": "logit_scale"}),
        GgufArchitecture("chatglm", "glm"),
        GgufArchitecture("glm4", "glm4"),
        GgufArchitecture("nemotron", "nemotron"),
        GgufArchitecture("gpt2", "gpt2"),
        GgufArchitecture(
            "lfm2",
            "lfm2",
            options={TAPS: "conv_L_cache"},
            computed={"block_auto_adjust_ff_dim": False},
            linears={**LINEARS, **CONVOLUTION_LINEARS},
        ),
    )
}
# What the converter writes as another architecture.
WRITTEN_AS: Mapping[str, str] = {
    "mistral": "llama",
    "mistral3": "ministral3",
    "gemma3": "gemma3_text",
    "olmo3": "olmo2",
}


def gguf_architecture(model_type: str) -> GgufArchitecture | None:
    """Returns how llama.cpp holds a model_type, or its text model; None for one without an entry."""
    written = WRITTEN_AS.get(model_type, model_type)
    return next((form for form in ARCHITECTURES.values() if form.model_type == written), None)


def gguf_rows(form: GgufArchitecture, shape: BaseShape, target: Target) -> NDArray[np.int64]:
    """Returns, for each row of a linear layer here, its place in llama.cpp's tensor of that layer alone, (out,).

    shape: of one decoder layer, if the base's layers differ.
    """
    rows = np.arange(shape.features(target)[1])
    if target in ("q_proj", "k_proj") and not shape.convolves:
        order = head_order(shape.head_dim, shape.rotary_dim, form.permuted or shape.interleaved)
        rows = rows.reshape(-1, shape.head_dim)[:, order].reshape(-1)
    return rows
