"""A base model with an adapter merged into its weights, as one GGUF file for llama.cpp and Ollama.

W + (alpha / r) (A B)^T in float32, tensor by tensor, then rounded: matrices to half precision or to blocks of 8 bits
(Q8_0), vectors not at all. A base that is itself a GGUF file keeps its vocabulary and settings; from a Hugging Face
directory they are written by the rules of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType

from server.compiler.checkpoints.base import BaseFacts, BaseFiles, locate_base
from server.compiler.checkpoints.checkpoint import open_checkpoint
from server.compiler.checkpoints.gguf import ROPE_FACTORS, gguf_facts
from server.compiler.checkpoints.gguf_names import ARCHITECTURES, TOP_NAMES, GgufArchitecture
from server.compiler.checkpoints.lazy import LazyTensor
from server.compiler.model.decoder import inverse_frequencies
from server.registry.exports.frozen_a import delta, joined
from server.registry.exports.gguf import interleave
from server.registry.exports.gguf_vocabulary import add_vocabulary
from server.registry.exports.merge import refuse_other_base
from shared.canonical import file_sha256
from shared.errors import UnsupportedFormat
from shared.protocol import MergedForm, PeftFile
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape

BLOCK = 32  # values that Q8_0 rounds together; a matrix whose rows are no multiple of it is stored in half precision
FILE_TYPES = {MergedForm.GGUF_F16: LlamaFileType.MOSTLY_F16, MergedForm.GGUF_Q8_0: LlamaFileType.MOSTLY_Q8_0}
NAMES = {MergedForm.GGUF_F16: "model-f16.gguf", MergedForm.GGUF_Q8_0: "model-q8_0.gguf"}
# Of a base that is a GGUF file: what its tensors' types and files were.
_OF_THE_FILE = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
_LEFT_OUT = ("GGUF.", "split.")
# Facts that a file of llama.cpp's holds in another form, or not at all.
_UNCOMPARED = {"sha256", "form", "parameters", "norm_eps", "rope"}


def merge_gguf(
    recipe: Recipe,
    shape: BaseShape,
    flat: F32,
    a_sha256: str,
    source: str,
    directory: Path,
    form: MergedForm,
    report: Callable[[str, float], None] = lambda stage, fraction: None,
    calibration: Calibration | None = None,
) -> list[PeftFile]:
    """Writes the merged model of the base at `source` into `directory`, made here, and returns its one file.

    flat: B, float32 (D,). a_sha256: fingerprint of the A that B was trained with. form: one of FILE_TYPES. report:
    told a stage's name and its fraction done. Raises UnsupportedFormat if llama.cpp would compute the base differently
    or its tokenizer cannot be written, and the errors of `server.registry.exports.merge.merge`.
    """
    report("read", 0.0)
    adapted = {
        f"layers.{module.layer}.{module.target}": (a, b)
        for module, a, b in joined(recipe, shape, flat, a_sha256, calibration)
    }
    files = locate_base(source)
    refuse_other_base(recipe, files)
    architecture = _architecture(shape.architecture)
    facts, tensors = open_checkpoint(files)
    directory.mkdir()
    path = directory / NAMES[form]
    writer = gguf.GGUFWriter(path, architecture.name)
    if files.form == "gguf":
        _copy_metadata(writer, files.root)
    else:
        _add_metadata(writer, architecture, facts)
        add_vocabulary(writer, files, facts.vocabulary)
    writer.add_file_type(FILE_TYPES[form])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("mobizo.base_sha256", recipe.base.sha256)
    writer.add_string("mobizo.recipe_id", recipe.id)
    factors = _rope_factors(facts)
    order = sorted(tensors, key=lambda name: _place(architecture, name))
    types = {name: _type(tensors[name], form) for name in order}
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for name in order:
        _announce(writer, _stock_name(architecture, name), tensors[name].shape, types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for number, name in enumerate(order):
        values: F32 = tensors[name].read().numpy()
        if name in adapted:
            values = values + delta(recipe, *adapted[name])
        heads = {"q_proj": facts.heads, "k_proj": facts.kv_heads}.get(name.rpartition(".")[2], 0)
        if architecture.interleaved and heads:
            values = interleave(values, heads)
        writer.write_tensor_data(gguf.quantize(np.ascontiguousarray(values), types[name]))
        report("merge", (number + 1) / len(order))
    writer.close()
    _refuse_other_facts(facts, path)
    return [PeftFile(path=path.name, size=path.stat().st_size, sha256=file_sha256(path))]


def _architecture(model_type: str) -> GgufArchitecture:
    architecture = next((each for each in ARCHITECTURES.values() if each.model_type == model_type), None)
    if architecture is None:
        raise UnsupportedFormat(
            f"no GGUF file is written for architecture {model_type!r}; they are written for "
            f"{', '.join(each.model_type for each in ARCHITECTURES.values())}; take the merged model as a directory"
        )
    return architecture


def _copy_metadata(writer: gguf.GGUFWriter, path: Path) -> None:
    """Copies the base's own metadata, except what its tensors' types were."""
    for name, field in gguf.GGUFReader(path).fields.items():
        if name not in _OF_THE_FILE and not name.startswith(_LEFT_OUT):
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)


def _add_metadata(writer: gguf.GGUFWriter, architecture: GgufArchitecture, facts: BaseFacts) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_block_count(facts.layers)
    writer.add_context_length(facts.context_length)
    writer.add_embedding_length(facts.hidden)
    writer.add_feed_forward_length(facts.intermediate)
    writer.add_head_count(facts.heads)
    writer.add_head_count_kv(facts.kv_heads)
    writer.add_key_length(facts.head_dim)
    writer.add_value_length(facts.head_dim)
    writer.add_layer_norm_rms_eps(facts.norm_eps)
    writer.add_vocab_size(facts.vocabulary)
    if architecture.interleaved:
        writer.add_rope_dimension_count(facts.head_dim)
    if facts.rope is not None:
        writer.add_rope_freq_base(facts.rope.theta)
        if facts.rope.kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(facts.rope.factor)
    if facts.window is not None:
        writer.add_sliding_window(facts.window)
    if facts.sliding_rope is not None:
        writer.add_rope_freq_base_swa(facts.sliding_rope.theta)
    for cap, add in (
        (facts.attention_softcap, writer.add_attn_logit_softcapping),
        (facts.final_softcap, writer.add_final_logit_softcapping),
    ):
        if cap is not None:
            add(cap)


def _rope_factors(facts: BaseFacts) -> F32 | None:
    """Returns the divisors of the rotary frequencies (head_dim / 2,) where they are a tensor of the file."""
    if facts.rope is None or facts.rope.kind not in ("llama3", "factors"):
        return None
    plain = facts.rope.model_copy(update={"kind": "default"})
    own, unscaled = (inverse_frequencies(rope, facts.head_dim) for rope in (facts.rope, plain))
    divisors: F32 = (unscaled / own).numpy()
    return divisors


def _stock_name(architecture: GgufArchitecture, name: str) -> str:
    """Returns llama.cpp's name of a canonical tensor. Raises UnsupportedFormat if it has none."""
    parts = name.split(".")
    if len(parts) == 1:
        return next(f"{gguf_name}.weight" for gguf_name, canonical in TOP_NAMES.items() if canonical == name)
    for gguf_name, canonical in architecture.layer_names.items():
        if canonical == parts[2]:
            return f"blk.{parts[1]}.{gguf_name}"
    raise UnsupportedFormat(f"llama.cpp's {architecture.name} has no tensor for {name}; take the model as a directory")


def _place(architecture: GgufArchitecture, name: str) -> tuple[int, str]:
    """Returns the order of the tensors: tables first, then layer by layer."""
    parts = name.split(".")
    return (-1, name) if len(parts) == 1 else (int(parts[1]), _stock_name(architecture, name))


def _type(tensor: LazyTensor, form: MergedForm) -> GGMLQuantizationType:
    if len(tensor.shape) < 2:
        return GGMLQuantizationType.F32
    blocks = form is MergedForm.GGUF_Q8_0 and tensor.shape[1] % BLOCK == 0
    return GGMLQuantizationType.Q8_0 if blocks else GGMLQuantizationType.F16


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
    """Adds the header of a tensor whose values are written later."""
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) // per_block * block_bytes, kind)


def _refuse_other_facts(facts: BaseFacts, path: Path) -> None:
    """Raises UnsupportedFormat if llama.cpp would compute the file differently than the base."""
    file_facts = gguf_facts(BaseFiles("gguf", path, (path,)))
    base_facts, exported_facts = facts.model_dump(exclude=_UNCOMPARED), file_facts.model_dump(exclude=_UNCOMPARED)
    if differences := sorted(name for name in base_facts if base_facts[name] != exported_facts[name]):
        raise UnsupportedFormat(
            f"llama.cpp computes a {facts.architecture} model with other values of {', '.join(differences)} than this "
            "base has; take the merged model as a directory"
        )
