"""Writes an adapter as a GGUF file that llama.cpp loads onto its own form of the base (`--lora`). Needs no torch.

llama.cpp has its own tensor names for each architecture, and another order of Llama's query and key rows: it rotates
neighbouring rows where Hugging Face rotates halves. The rows of B are reordered accordingly; the columns of A belong to
the layer's input, whose order is the same everywhere. An adapter that llama.cpp would compute differently is refused
with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.registry.exports.frozen_a import joined
from shared.errors import UnsupportedFormat
from shared.recipe import Recipe, Target
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape

NAMES: Mapping[Target, str] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Form:
    """How llama.cpp holds one architecture: its name there, and whether query and key rows are neighbours."""

    name: str
    interleaved: bool = False


FORMS: Mapping[str, Form] = {
    "llama": Form("llama", interleaved=True),
    "mistral": Form("llama", interleaved=True),
    "qwen2": Form("qwen2"),
    "qwen3": Form("qwen3"),
    "gemma3_text": Form("gemma3"),
    "gemma3": Form("gemma3"),
}


def gguf_lora(
    recipe: Recipe, shape: BaseShape, flat: F32, a_sha256: str, calibration: Calibration | None = None
) -> bytes:
    """A and B as a GGUF adapter, float32; the same arguments give the same bytes.

    flat: B, float32 (D,). a_sha256: fingerprint of the A that B was trained with. calibration: the one that
    the recipe names, if it names one. Raises UnsupportedFormat for an architecture that is not in FORMS, AMismatch,
    InvalidUpload when B is not of the recipe's size, or InvalidRecipe without the calibration.
    """
    # Imported here: a web process without requests for GGUF does not load it.
    import gguf

    refuse_other_architectures(shape)
    form = FORMS[shape.architecture]
    adapted = joined(recipe, shape, flat, a_sha256, calibration)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "adapter.gguf"
        writer = gguf.GGUFWriter(path, form.name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, recipe.alpha)
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, recipe.base.name)
        writer.add_string("mobizo.base_sha256", recipe.base.sha256)
        writer.add_string("mobizo.recipe_id", recipe.id)
        writer.add_string("mobizo.a_sha256", a_sha256)
        for module, a, b in adapted:
            rows = b.T  # (out, r)
            if form.interleaved and module.target in ("q_proj", "k_proj"):
                rows = interleave(rows, shape.heads if module.target == "q_proj" else shape.kv_heads)
            name = f"blk.{module.layer}.{NAMES[module.target]}.weight"
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a.T))  # (r, in)
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(rows))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def refuse_other_architectures(shape: BaseShape) -> None:
    """Raises UnsupportedFormat for an architecture that is not in FORMS."""
    if shape.architecture not in FORMS:
        raise UnsupportedFormat(
            f"no GGUF adapter is made for architecture {shape.architecture!r}; they are made for {', '.join(FORMS)}"
        )


def interleave(rows: F32, heads: int) -> F32:
    """Rows (heads * head_dim, n) of Hugging Face's order in llama.cpp's: a head's halves become neighbours."""
    out, columns = rows.shape
    return rows.reshape(heads, 2, out // heads // 2, columns).swapaxes(1, 2).reshape(out, columns)
