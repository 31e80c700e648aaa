"""Every architecture against transformers: the decoder's logits, and training steps of the compiled program."""

import json
import shutil

import numpy as np
import pytest
import torch

from server.compiler.checkpoints.base import AttentionKind, Rope
from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from tests.server.compiler import reference
from tests.server.compiler.checks import check_steps
from tests.server.compiler.conftest import (
    COMPILED,
    LINEAR_ROPE,
    VOCABULARY,
)

LR, EPS, STEPS = 0.05, 0.02, 3


@pytest.mark.parametrize("name", COMPILED)
def test_steps_of_the_compiled_program_follow_the_algorithm(architectures, name):
    program, rng = architectures.program(name), np.random.default_rng(7)
    batches = [reference.random_batch(rng, program.manifest.recipe, VOCABULARY) for _ in range(STEPS)]
    check_steps(program, architectures.base(name).model, batches, LR, EPS, tolerance=1e-3)


def test_a_checkpoint_of_the_model_without_its_head_is_read(architectures, tmp_path):
    base = architectures.base("opt")
    base.model.model.save_pretrained(tmp_path)
    ours, expected = load_checkpoint(str(tmp_path)), load_checkpoint(str(base.directory))
    assert torch.equal(ours.norms, expected.norms)
    assert torch.equal(ours.tables["positions"], expected.tables["positions"])


def copy_with(base, directory, changes, removed=()):
    """A copy of a base whose config.json says something else."""
    shutil.copytree(base, directory)
    path = directory / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name not in removed}
    path.write_text(json.dumps(config | changes))
    return str(directory)


NEWER = ("rope_parameters", "layer_types", "_sliding_window_pattern")
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("llama", {"rope_theta": 100.0, "rope_scaling": LLAMA3_SCALING}),
        ("qwen2", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("qwen3", {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        (
            "gemma3_text",
            {
                "rope_theta": 1000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
                "rope_local_base_freq": 50.0,
                "sliding_window_pattern": 3,
            },
        ),
    ],
)
def test_the_older_spelling_means_the_same(architectures, tmp_path, name, older):
    base = architectures.base(name).directory
    facts = inspect_base(copy_with(base, tmp_path / "older", older, NEWER))
    assert facts.model_dump(exclude={"sha256"}) == inspect_base(str(base)).model_dump(exclude={"sha256"})


@pytest.mark.parametrize(
    ("name", "removed", "field", "value"),
    [
        ("gemma3_text", ("tie_word_embeddings",), "tied", True),
        ("gemma3_text", ("query_pre_attn_scalar",), "attention_scale", 1 / 16),
        ("opt", ("tie_word_embeddings",), "tied", True),
        ("qwen3", ("rope_parameters",), "attention", (AttentionKind(rope=Rope(theta=10000.0)),)),
        ("qwen2", ("layer_types", "use_sliding_window"), "layer_kinds", ()),
    ],
)
def test_what_config_json_leaves_out_is_what_transformers_takes(architectures, tmp_path, name, removed, field, value):
    source = copy_with(architectures.base(name).directory, tmp_path / "base", {}, removed)
    assert getattr(inspect_base(source), field) == value


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "tanh"}, "activation 'tanh'"),
        ("llama", {"sliding_window": 128}, "sliding_window 128"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial rotary embedding 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "mrope", "factor": 8.0}}, "RoPE scaling 'mrope'"),
        ("qwen3", {"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "chunked_attention"),
        ("qwen3", {"model_type": "qwen2"}, r"k_norm\.weight is not part of the supported qwen2 decoder"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim 16"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "proportional", "factor": 2.0}}},
            "RoPE scaling 'proportional'",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(architectures, tmp_path, name, changes, message):
    source = copy_with(architectures.base(name).directory, tmp_path / "base", changes)
    with pytest.raises(UnsupportedModel, match=message):
        inspect_base(source)


def test_a_window_as_long_as_the_context_is_none(architectures, tmp_path):
    source = copy_with(architectures.base("qwen2").directory, tmp_path / "base", {"sliding_window": 64})
    assert {kind.window for kind in inspect_base(source).attention} == {None}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters do not match a llama model"),
        ("llama", {"rope_parameters": {"full_attention": LINEAR_ROPE}}, "rope_parameters do not match a llama model"),
        ("gemma3_text", {"rope_parameters": LINEAR_ROPE}, "rope_parameters do not match a gemma3_text model"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("qwen2", {"use_sliding_window": False}, "set sliding_window"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(architectures, tmp_path, name, changes, message):
    source = copy_with(architectures.base(name).directory, tmp_path / "base", changes)
    with pytest.raises(UnreadableCheckpoint, match=message):
        inspect_base(source)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"attention_bias": False},
            r"does not use 12 tensors of the checkpoint; the first is layers\.0\.k_proj_bias",
        ),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": None}, r"does not use 12 tensors .* layers\.2\.down_proj"),
    ],
)
def test_tensors_that_the_configuration_does_not_speak_of_are_refused(architectures, tmp_path, name, changes, message):
    source = copy_with(architectures.base(name).directory, tmp_path / "base", changes)
    with pytest.raises(UnsupportedModel, match=message):
        load_checkpoint(source)
