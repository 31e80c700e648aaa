"""Checkpoint forms: what is read, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from server.compiler.checkpoint import inspect_base, load_checkpoint
from shared.errors import UnknownBase, UnreadableCheckpoint, UnsupportedModel
from tests.server.compiler.conftest import VOCABULARY, TinyBase


@pytest.fixture
def editable(tiny: TinyBase, tmp_path: Path) -> Path:
    """A copy of the tiny base to spoil."""
    return Path(shutil.copytree(tiny.directory, tmp_path / "base"))


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_gguf(base: TinyBase, path: Path, **metadata: Any) -> None:
    """The tiny base as llama.cpp's converter writes it: query and key rows of a head interleaved."""
    config = base.model.config
    writer = gguf.GGUFWriter(str(path), metadata.pop("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in base.model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, columns = values.shape
            values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_facts_of_a_directory(tiny: TinyBase, tiny_tied: TinyBase) -> None:
    facts = inspect_base(str(tiny.directory))
    assert (facts.architecture, facts.layers, facts.hidden, facts.intermediate) == ("llama", 2, 32, 48)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.vocabulary) == (4, 2, 8, VOCABULARY)
    assert (facts.context_length, facts.tied, facts.norm_eps, facts.rope_theta) == (64, False, 1e-6, 10000.0)
    assert facts.parameters == sum(p.numel() for p in tiny.model.parameters())
    tied = inspect_base(str(tiny_tied.directory))
    assert tied.tied
    assert tied.parameters == sum(p.numel() for p in tiny_tied.model.parameters())


def test_the_digest_follows_names_and_bytes(editable: Path) -> None:
    before = inspect_base(str(editable)).sha256
    (editable / "notes.txt").write_text("not pinned")
    assert inspect_base(str(editable)).sha256 == before
    (editable / "tokenizer.json").write_text("{}")
    assert inspect_base(str(editable)).sha256 != before


def test_gguf_gives_the_same_weights(tiny: TinyBase, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path)
    ours, expected = load_checkpoint(str(path)), load_checkpoint(str(tiny.directory))
    tensors = ours.tensors()
    assert tensors.keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(tensors[name], tensor), name
    kept = {"sha256", "form", "norm_eps"}
    assert ours.facts.model_dump(exclude=kept) == expected.facts.model_dump(exclude=kept)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llama"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "RoPE scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "MLP biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(editable: Path, changes: dict, named: str) -> None:
    edit_config(editable, **changes)
    with pytest.raises(UnsupportedModel, match=named):
        inspect_base(str(editable))


def test_gguf_refusals(tiny: TinyBase, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "scaled.gguf", llama__rope__scaling__type="yarn")
    with pytest.raises(UnsupportedModel, match="RoPE scaling 'yarn'"):
        inspect_base(str(tmp_path / "scaled.gguf"))
    write_gguf(tiny, tmp_path / "phi.gguf", architecture="phi3")
    with pytest.raises(UnsupportedModel, match="phi3"):
        inspect_base(str(tmp_path / "phi.gguf"))
    (tmp_path / "torn.gguf").write_bytes((tmp_path / "scaled.gguf").read_bytes()[:1000])
    with pytest.raises(UnreadableCheckpoint, match=r"torn\.gguf"):
        inspect_base(str(tmp_path / "torn.gguf"))


def test_damaged_directories_are_refused(editable: Path) -> None:
    weights = editable / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors"):
        load_checkpoint(str(editable))
    weights.write_bytes(whole)
    edit_config(editable, num_hidden_layers=3)
    with pytest.raises(UnreadableCheckpoint, match=r"lacks 9 tensors"):
        load_checkpoint(str(editable))
    edit_config(editable, num_hidden_layers=2, intermediate_size=64)
    with pytest.raises(UnreadableCheckpoint, match="gate_proj has shape"):
        load_checkpoint(str(editable))
    weights.unlink()
    with pytest.raises(UnreadableCheckpoint, match=r"no \.safetensors"):
        inspect_base(str(editable))


def test_an_unknown_source_is_named() -> None:
    with pytest.raises(UnknownBase, match="no such//model"):
        inspect_base("no such//model")
