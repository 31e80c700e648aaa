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
from tests.server.registry.exports.stock import LlamaCpp, make_base, prompts, write_gguf, write_vocabulary

BASES = ("llama", "qwen2", "qwen3", "gemma3_text-deep")
LENGTH = 12  # three windows of the tiny Gemma


@pytest.mark.parametrize("name", BASES)
def test_logits_are_those_of_transformers_and_llama_cpp(tmp_path, name):
    base = make_base(tmp_path / "base", name)
    path = write_gguf(base, tmp_path / "base.gguf")
    ours, theirs = inspect_base(str(path)), inspect_base(str(base.directory))
    excluded_fields = {"sha256", "form", "norm_eps", "context_length"}
    assert ours.model_dump(exclude=excluded_fields) == theirs.model_dump(exclude=excluded_fields)
    tokens = torch.from_numpy(prompts(4, LENGTH))
    with torch.no_grad():
        expected = base.model()(tokens).logits
        logits = eager_logits(load_checkpoint(str(path)), tokens)
    assert float((logits - expected).abs().max()) < 1e-4
    likeliest = torch.log_softmax(expected[:, -1], -1).max(1)
    llama = LlamaCpp(path)
    answers = [llama.top(row) for row in tokens.tolist()]
    assert [token for token, _ in answers] == likeliest.indices.tolist()
    np.testing.assert_allclose([value for _, value in answers], likeliest.values, atol=1e-3)


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
def test_what_the_decoder_lacks_is_refused_by_name(tmp_path, monkeypatch, name, key, value, reason):
    base = make_base(tmp_path / "base", name)
    begin = gguf.GGUFWriter.add_block_count

    def add(writer, count):
        begin(writer, count)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", add)
    with pytest.raises(UnsupportedModel, match=reason):
        inspect_base(str(write_gguf(base, tmp_path / "base.gguf")))


# The families that llama.cpp computes as transformers does, with settings that a GGUF file can hold; its name of each.
SLIDING = {"head_dim": 16, "sliding_window": WINDOW}
CAPPED = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
OLMO3_ROPE = {
    "full_attention": {**YARN, "attention_factor": 0.1 * math.log(YARN["factor"]) + 1},
    "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
}
MINISTRAL3_ROPE = {**FAMILIES["ministral3"]["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
IN_GGUF: dict[str, tuple[str, dict[str, Any]]] = {
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
NAMED = [pytest.param(name, marks=() if name in ("phi3", "granite", "lfm2") else pytest.mark.slow) for name in IN_GGUF]
PERMUTED = ("smollm3", "granite", "arcee", "mistral", "ministral3")
NUMBERS = {  # of config.json, by the writer's methods
    "add_block_count": ("num_hidden_layers",),
    "add_context_length": ("max_position_embeddings",),
    "add_embedding_length": ("hidden_size",),
    "add_head_count": ("num_attention_heads",),
    "add_layer_norm_rms_eps": ("rms_norm_eps", "norm_eps"),
    "add_layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "add_sliding_window": ("sliding_window",),
    "add_attn_logit_softcapping": ("attn_logit_softcapping",),
    "add_final_logit_softcapping": ("final_logit_softcapping",),
    "add_attention_scale": ("attention_multiplier",),
    "add_embedding_scale": ("embedding_multiplier",),
    "add_residual_scale": ("residual_multiplier",),
    "add_logit_scale": ("logits_scaling", "logit_scale"),
    "add_parallel_residual": ("use_parallel_residual",),
    "add_shortconv_l_cache": ("conv_L_cache",),
}


def write_family(model, architecture, path, kind=gguf.GGMLQuantizationType.F32):
    """A family's model as llama.cpp's converter writes it. kind: of tensors whose rows are whole blocks."""
    config = model.config.get_text_config()
    model_type = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    for method, names in NUMBERS.items():
        values = (getattr(config, name, None) for name in names)
        if (value := next((value for value in values if value is not None), None)) is not None:
            getattr(writer, method)(value)
    if model_type not in ("gpt_neox", "gpt2"):
        kinds = config.layer_types if model_type == "lfm2" else []
        heads = [0 if kind == "conv" else config.num_key_value_heads for kind in kinds]
        writer.add_head_count_kv(heads or config.num_key_value_heads)
    adjusted = model.state_dict().get("model.layers.0.feed_forward.w1.weight", np.empty(0))  # of lfm2
    width = len(adjusted) or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    writer.add_feed_forward_length(width)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if model_type != "gpt2":
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
        writer.add_rope_dimension_count(rotated)
        if rope["rope_type"] == "longrope":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "attention_factor" in rope:
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if model_type == "ministral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    write_vocabulary(writer, config.vocab_size)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and model.config.tie_word_embeddings) or "vision" in name or "multi_modal" in name:
            continue
        stem, _, ending = name.replace("language_model.", "").rpartition(".")
        values = np.ascontiguousarray(as_llama_cpp(config, model_type, name, tensor.numpy()))
        whole = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_llama_cpp(config, model_type, name, values):
    """A tensor of transformers in the form of llama.cpp."""
    heads = config.num_attention_heads
    if model_type in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = heads if "q_proj" in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if name.endswith("norm.weight") and model_type in ("gemma", "gemma2", "nemotron"):
        return values + 1
    if "query_key_value" in name:  # from head to head, and here queries, keys and values
        return values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if "conv.conv" in name:
        return values[:, 0]
    return values.T if model_type == "gpt2" and ".c_" in name and values.ndim == 2 else values


@pytest.mark.parametrize("name", NAMED)
def test_a_family_computes_what_transformers_and_llama_cpp_do(tmp_path, name):
    architecture, settings = IN_GGUF[name]
    made = make_family(tmp_path / "base", name.split()[0], settings)
    path = write_family(made.model, architecture, tmp_path / "base.gguf")
    checkpoint = load_checkpoint(str(path))
    assert checkpoint.facts.parameters == made.checkpoint.facts.parameters
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
    path = write_family(made.model, "lfm2", tmp_path / "base.gguf")
    with pytest.raises((UnreadableCheckpoint, UnsupportedModel), match=message):
        load_checkpoint(str(path))


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F16"])
@pytest.mark.parametrize("name", ["phi3", pytest.param("granite", marks=pytest.mark.slow)])
def test_a_quantized_family_computes_what_transformers_does_with_its_weights(tmp_path, name, kind):
    kind = gguf.GGMLQuantizationType[kind]
    made = make_family(tmp_path / "base", name, IN_GGUF[name][1])
    path = write_family(made.model, IN_GGUF[name][0], tmp_path / "base.gguf", kind)
    with torch.no_grad():
        for parameter in made.model.parameters():  # blocks lie within a row, whatever the order of rows
            if parameter.dim() == 2 and parameter.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
                blocks = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
        tokens = torch.from_numpy(prompts(4, LENGTH))
        expected = made.model(tokens).logits
        assert relative(eager_logits(load_checkpoint(str(path)), tokens), expected) < CLOSE
