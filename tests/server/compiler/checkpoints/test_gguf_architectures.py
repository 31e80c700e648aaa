"""GGUF bases, written by llama.cpp's rules: our decoder computes what transformers and llama.cpp compute."""

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from server.compiler.checkpoints.checkpoint import inspect_base, load_checkpoint
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from tests.server.compiler.conftest import WINDOW, eager_logits
from tests.server.compiler.test_families import CLOSE, FAMILIES, YARN, make_family, relative
from tests.server.gguf_files import K_SCALES, quantized, write_gguf
from tests.server.registry.exports.stock import LlamaCpp, prompts

LENGTH = 12  # three windows of the tiny Gemma


# The families that llama.cpp computes as transformers does, with settings that a GGUF file can hold; its name of each.
SLIDING = {"head_dim": 16, "sliding_window": WINDOW}
CAPPED = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
OLMO3_ROPE = {
    "full_attention": {**YARN, "attention_factor": 0.1 * math.log(YARN["factor"]) + 1},
    "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
}
MINISTRAL3_ROPE = {**FAMILIES["ministral3"]["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
IN_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3_text": (  # its sixth layer sees everything, the others four tokens
        "gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {**SLIDING, **CAPPED}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", FAMILIES["phi3 longrope"]),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", FAMILIES["granite"]),
    "arcee": ("arcee", {}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "hunyuan_v1_dense": ("hunyuan-dense", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": False}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {"num_hidden_layers": 5, "sliding_window": WINDOW, "rope_parameters": OLMO3_ROPE}),
    "stablelm": ("stablelm", FAMILIES["stablelm"]),
    "stablelm parallel": ("stablelm", FAMILIES["stablelm parallel"]),
    "gpt_neox": ("gptneox", {"rotary_pct": 0.5}),
    "gpt_neox serial": ("gptneox", {"rotary_pct": 1.0, "use_parallel_residual": False}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("command-r", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": WINDOW}),
    "glm": ("chatglm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 16}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {}),
    "lfm2": ("lfm2", FAMILIES["lfm2"]),
    "lfm2 attends last": ("lfm2", FAMILIES["lfm2 attends last"]),
    "mistral3": ("mistral3", FAMILIES["mistral3"]),
    "ministral3": ("mistral3", {"rope_parameters": MINISTRAL3_ROPE}),
    "qwen3 yarn": ("qwen3", {"head_dim": 16, **FAMILIES["llama yarn"]}),
}
QUICK = ("llama", "qwen2", "gemma3_text", "phi3", "granite", "lfm2")
SAME_FACTS = ("llama", "qwen2", "qwen3", "gemma3_text")
OTHER_FACTS = {"sha256", "form", "norm_eps", "context_length"}
NAMED = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in IN_GGUF]


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("qwen3", "qwen3.attention.sliding_window", 8, "sliding-window attention"),
        ("gemma3_text", "gemma3.attention.sliding_window_pattern", 3, "a sliding-window pattern of 3"),
        ("gemma3_text", "gemma3.final_logit_softcapping", 30.0, "soft caps"),
        ("qwen2", "qwen2.rope.dimension_count", 4, "rope.dimension_count 4"),
        ("qwen2", "qwen2.rope.scaling.yarn_attn_factor", 2.0, "YaRN's attn_factor 2.0"),
        ("qwen2", "qwen2.rope.scaling.yarn_ext_factor", 0.0, "YaRN's ext_factor 0.0"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, name, key, value, reason):
    architecture, settings = IN_GGUF[name]
    made = make_family(tmp_path / "base", name, settings)

    def add(writer):
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)

    with pytest.raises(UnsupportedModel, match=reason):
        inspect_base(str(write_gguf(made.model, architecture, tmp_path / "base.gguf", add=add)))


@pytest.mark.parametrize("name", NAMED)
def test_a_family_computes_what_transformers_and_llama_cpp_do(tmp_path, name):
    architecture, settings = IN_GGUF[name]
    made = make_family(tmp_path / "base", name.split()[0], settings)
    path = write_gguf(made.model, architecture, tmp_path / "base.gguf")
    checkpoint = load_checkpoint(str(path))
    assert checkpoint.facts.parameters == made.checkpoint.facts.parameters
    if name in SAME_FACTS:
        ours, theirs = (each.facts.model_dump(exclude=OTHER_FACTS) for each in (checkpoint, made.checkpoint))
        assert ours == theirs
    tokens = torch.from_numpy(prompts(4, LENGTH))
    with torch.no_grad():
        expected = made.model(tokens).logits
        assert relative(eager_logits(checkpoint, tokens), expected) < CLOSE
    if name == "phi3 longrope":
        return  # llama.cpp chooses factors by the size of its context
    likeliest = torch.log_softmax(expected[:, -1], -1).max(1)
    llama = LlamaCpp(path)
    answers = [llama.top(row) for row in tokens.tolist()]
    assert [token for token, _ in answers] == likeliest.indices.tolist()
    np.testing.assert_allclose([value for _, value in answers], likeliest.values, atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_L_cache": 4}, r"layers\.0\.tap_0 has shape \(32, 3\)"),
        ({"conv_L_cache": 1 << 30}, "conv_taps"),
        ({"layer_types": ["conv"] * 3}, r"another lfm2\.attention\.head_count_kv in each layer"),
        ({"layer_types": ["full_attention", "conv", "conv"]}, "lacks"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types lists 2 of 3 layers"),
    ],
)
def test_a_file_whose_convolutions_contradict_its_metadata_is_refused(tmp_path, changes, message):
    made = make_family(tmp_path / "base", "lfm2", FAMILIES["lfm2"])
    for name, value in changes.items():
        setattr(made.model.config, name, value)
    path = write_gguf(made.model, "lfm2", tmp_path / "base.gguf")
    with pytest.raises((UnreadableCheckpoint, UnsupportedModel), match=message):
        load_checkpoint(str(path))


KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_SCALES)
REORDERED = ("granite", "smollm3", "gpt_neox", "lfm2", "olmo3", "stablelm", "glm", "ministral3", "gemma3_text")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("phi3", kind) for kind in KINDS],
        *[pytest.param(name, kind, marks=pytest.mark.slow) for name in REORDERED for kind in ("Q8_0", "Q4_1", "Q4_K")],
    ],
)
def test_a_quantized_family_computes_what_transformers_does_with_its_weights(tmp_path, name, kind):
    kind = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[kind][0]
    wide = {"hidden_size": size, "intermediate_size": size} if size > 32 else {}
    architecture, settings = IN_GGUF[name]
    made = make_family(tmp_path / "base", name, {**settings, **wide})
    path = write_gguf(made.model, architecture, tmp_path / "base.gguf", kind)
    with torch.no_grad():
        for parameter in made.model.parameters():  # blocks lie within a row, whatever the order of rows
            if parameter.dim() == 2 and parameter.shape[1] % size == 0:
                blocks = quantized(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
        tokens = torch.from_numpy(prompts(4, LENGTH))
        expected = made.model(tokens).logits
        assert relative(eager_logits(load_checkpoint(str(path)), tokens), expected) < CLOSE
