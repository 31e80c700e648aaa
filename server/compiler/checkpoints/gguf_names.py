"""How llama.cpp holds each architecture in a GGUF file: its name, the tensors' names, the order of query and key rows.

Source: llama.cpp's `convert_hf_to_gguf.py` and the tensor names of its `gguf` package. Norms that multiply by
1 + weight (Gemma) are stored with their one added, which is also their canonical form here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from server.compiler.checkpoints.architectures import QKV
from shared.recipe import Target

TOP_NAMES: Mapping[str, str] = {"token_embd": "embedding", "output_norm": "norm", "output": "lm_head"}
LINEARS: Mapping[str, Target] = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
NORMS: Mapping[str, str] = {"attn_norm": "input_norm", "ffn_norm": "post_norm"}
HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}
SANDWICH: Mapping[str, str] = {"post_attention_norm": "attention_out_norm", "post_ffw_norm": "mlp_out_norm"}


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture as llama.cpp holds it."""

    name: str  # in `general.architecture`, and before the names of its metadata
    model_type: str  # in transformers
    interleaved: bool = False  # rows of a query or key head are neighbours that rotate together, not halves
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)  # llama.cpp's name -> canonical name
    biases: tuple[Target, ...] = ()
    qk_norm: bool = False

    @property
    def layer_names(self) -> dict[str, str]:
        """llama.cpp's names of one layer's weights and biases, after `blk.N.`, with their canonical names."""
        weights = {f"{gguf_name}.weight": canonical for gguf_name, canonical in {**self.norms, **LINEARS}.items()}
        return weights | {
            f"{gguf_name}.bias": f"{canonical}_bias"
            for gguf_name, canonical in LINEARS.items()
            if canonical in self.biases
        }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    form.name: form
    for form in (
        GgufArchitecture("llama", "llama", interleaved=True),
        GgufArchitecture("qwen2", "qwen2", biases=QKV),
        GgufArchitecture("qwen3", "qwen3", norms={**NORMS, **HEAD_NORMS}, qk_norm=True),
        GgufArchitecture("gemma3", "gemma3_text", norms={**NORMS, **HEAD_NORMS, **SANDWICH}, qk_norm=True),
    )
}
# llama.cpp computes these of Gemma 3 without reading them from the file.
GEMMA_PATTERN = 6  # every sixth layer sees the whole context, the others a window
GEMMA_SLIDING_THETA = 10000.0
GEMMA_27B_LAYERS = 62  # the one size whose attention scores are scaled by the mean width of a head
