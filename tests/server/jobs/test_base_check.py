"""`mobizo-server base check`: what a base could do, from its configuration and headers alone."""

import json
import math
import re
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from server.catalog.bases import inspect
from server.cli.main import app
from server.compiler.checkpoints import base as base_module
from server.compiler.checkpoints import checkpoint
from server.compiler.checkpoints.gguf_file import GgufTensor
from server.compiler.checkpoints.hub import download
from server.jobs.base_check import check_base
from shared.errors import BadRequest, UnreadableCheckpoint, UnsupportedModel
from tests.server.cli.conftest import call


def sizes(hidden, intermediate, layers, heads, vocabulary, context, kv_heads=None, **others):
    """A config.json by the names of Llama."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        **others,
    }


QWEN3 = sizes(1024, 3072, 28, 16, 151936, 40960, 8, model_type="qwen3", head_dim=128, tie_word_embeddings=True)
LLAMA = sizes(2048, 8192, 16, 32, 128256, 131072, 8, model_type="llama", head_dim=64, tie_word_embeddings=True)
MISTRAL = sizes(4096, 14336, 32, 32, 32000, 32768, 8, model_type="mistral", sliding_window=4096)
GEMMA3 = sizes(2560, 10240, 34, 8, 262208, 131072, 4, model_type="gemma3_text", head_dim=256, sliding_window=1024)
# Configurations as the Hub serves them, with the number of parameters that it shows (of the text model alone).
SUPPORTED = {
    "Qwen3-0.6B": (QWEN3, 596_049_920),
    "Llama-3.2-1B": (LLAMA, 1_235_814_400),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": GEMMA3,
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        },
        3_880_263_168,
    ),
    "Phi-3-mini-4k-instruct": (
        sizes(3072, 8192, 32, 32, 32064, 4096, model_type="phi3", sliding_window=2047)
        | {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}},
        3_821_079_552,
    ),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        124_439_808,
    ),
    "pythia-70m": (
        sizes(512, 2048, 6, 8, 50304, 2048, model_type="gpt_neox", rotary_pct=0.25),
        70_426_624,
    ),
    "LFM2-350M": (
        sizes(1024, 6656, 16, 16, 65536, 128000, 8, model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        354_483_968,
    ),
}
WIDTHS = {"BF16": 2, "F8_E4M3": 1}  # bytes of a number
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip"}}
REFUSED = {
    "Mixtral-8x7B": (
        {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8},
        "it is a mixture of experts; the nearest supported: qwen3",
    ),
    "mamba-130m": ({"model_type": "mamba", "state_size": 16}, "state-space, .*; the nearest supported: qwen3, smollm3"),
    "LFM2-8B-A1B": ({"model_type": "lfm2_moe", "num_experts": 32}, "a mixture of experts; the nearest supported: lfm2"),
    "bert-base": (
        {"model_type": "bert", "hidden_size": 768},
        "it is an encoder or an encoder-decoder model; the nearest supported: qwen3",
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "num_local_experts": 32, "is_encoder_decoder": False},
        "it is a mixture of experts; the nearest supported: qwen3",
    ),
    "gemma-3n-E2B": (
        {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}, "vision_config": {"depth": 1}},
        "a multimodal model, whose text model is 'gemma3n_text'; the nearest supported: gemma3_text, gemma3, gemma",
    ),
    "phi-2": (
        {"model_type": "phi", "is_encoder_decoder": False},
        "'phi' is not supported; the nearest supported: phi3",
    ),
    "llava-1.5-7b": (LLAVA, "a multimodal model, whose text model is 'llama'; the nearest supported: llama"),
    "Llama-2-7B-GPTQ": (
        {**LLAMA, "quantization_config": {"quant_method": "gptq"}},
        "quantized by gptq .* BF16 or F16, or a GGUF file",
    ),
    "llama-w4a16": ({**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}}, "by compressed-tensors"),
    "Llama-3.2-1B-4bit": ({**LLAMA, "quantization": {"group_size": 64, "bits": 4}}, "quantized by an unnamed method"),
    "internlm-7b": (
        {**LLAMA, "model_type": "internlm", "auto_map": {"AutoModel": "modeling_internlm.InternLMModel"}},
        r"'internlm' is not supported; code in a checkpoint \(auto_map\) is never executed; the nearest supported",
    ),
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub whose only model has this configuration, and no weights here."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    monkeypatch.setattr(checkpoint, download.__name__, lambda source, patterns: tmp_path)
    return tmp_path


def llama_tensors(config):
    """The names and shapes of the tensors of a Llama, with a copy of the tied table, as some trainers save it."""
    hidden, wide, table = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        **{f"self_attn.{name}": (hidden, hidden) for name in ("q_proj", "o_proj")},
        **{f"self_attn.{name}": (keys, hidden) for name in ("k_proj", "v_proj")},
        **{f"mlp.{name}": (wide, hidden) for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": (hidden, wide),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    top = {"lm_head": (table, hidden), "model.embed_tokens": (table, hidden), "model.norm": (hidden,)}
    layers = range(config["num_hidden_layers"])
    named = top | {f"model.layers.{index}.{name}": shape for index in layers for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in named.items()}


def write_directory(directory, config, tensors, dtype="BF16"):
    """Writes a checkpoint whose weights are a header and a hole of their size."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return str(directory)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_model_of_the_hub_is_checked_by_its_configuration(hub, name):
    config, parameters = SUPPORTED[name]
    (hub / "config.json").write_text(json.dumps(config))
    check = check_base(f"acme/{name}")
    assert check.shape.architecture == config["model_type"]
    assert check.parameters == parameters
    assert check.chat_template
    assert check.precisions["int8"].estimators == ("replay", "stored", "gradient", "directional")
    assert check.precisions["int4"].estimators == ("replay", "stored", "gradient", "directional")
    assert check.precisions["int4"].device_bytes["gradient"] < check.precisions["int8"].device_bytes["gradient"]
    needs = check.precisions["int8"].device_bytes
    assert parameters < needs["replay"] < needs["gradient"] < check.precisions["fp32"].device_bytes["gradient"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_says_what_is(hub, name):
    """Of a directory before its weights: a reader of "convert the weights" would do so for nothing."""
    config, message = REFUSED[name]
    (hub / "config.json").write_text(json.dumps(config))
    for source in (f"acme/{name}", str(hub)):
        with pytest.raises(UnsupportedModel, match=message):
            check_base(source)


def test_the_command_prints_it(hub):
    text = call("base", "check", "acme/qwen3")
    assert "qwen3, 596 M parameters, 28 layers, 40,960 tokens of context" in text
    assert json.loads(call("base", "check", "acme/qwen3", "--json"))["precisions"]["int8"]["device_bytes"]["replay"]
    assert call("base", "add", "small", "acme/qwen3", "--dry-run") == text  # here, without a home
    (hub / "chat_template.jinja").unlink(missing_ok=True)
    (hub / "tokenizer_config.json").unlink()
    assert "chat template: no" in call("base", "check", "acme/qwen3")
    with pytest.raises(BadRequest, match="looks like OWNER/NAME"):
        call("base", "add", "small", "acme/qwen3", "--dry-run", "--hub-id", "small")


def test_a_refusal_as_json(hub):
    (hub / "config.json").write_text(json.dumps(REFUSED["bert-base"][0]))
    with pytest.raises(UnsupportedModel, match="it is an encoder"):
        call("base", "check", "acme/bert")
    for command in (("check",), ("add", "bert", "--dry-run")):
        answer = json.loads(printed("base", *command, "acme/bert", "--json"))
        assert answer["source"] == "acme/bert"
        assert "it is an encoder or an encoder-decoder model; the nearest supported" in answer["refused"]


def printed(*arguments):
    """What a command that fails printed to its standard output."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 1
    return result.stdout


def test_a_hub_model_without_a_configuration_is_named(hub):
    (hub / "config.json").unlink()
    with pytest.raises(UnreadableCheckpoint, match=r"acme/some-GGUF has no config\.json; give .* or a \.gguf file"):
        check_base("acme/some-GGUF")


def test_headers_alone_are_read(tmp_path):
    """In a process of its own: without torch, and far less memory than one of the tables."""
    source = write_directory(tmp_path / "llama", LLAMA, llama_tensors(LLAMA))
    script = "import re, sys; from server.jobs.base_check import check_base\n"
    script += "print(check_base(sys.argv[1]).parameters)\n"
    script += "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])\n"
    script += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    command = [sys.executable, "-c", script, source]
    parameters, kilobytes = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert parameters == 1_235_814_400
    assert kilobytes < 500_000


def write_gguf(path, pre):
    """A Llama of one layer whose tokenizer is of the kind `pre`."""
    tiny = sizes(64, 128, 1, 4, 8, 64, head_dim=16)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list("abcdefgh"))
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, shape in llama_tensors(tiny).items():
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_of_a_gguf_file_are_not_read(tmp_path, monkeypatch):
    for name, pre in (("tiny", "qwen2"), ("odd", "viking")):
        write_gguf(tmp_path / f"{name}.gguf", pre)
    monkeypatch.setattr(GgufTensor, "values", lambda tensor: pytest.fail(f"{tensor.name} is read"))
    check = check_base(str(tmp_path / "tiny.gguf"))
    assert (check.shape.architecture, check.parameters, check.chat_template) == (
        "llama",
        2 * 8 * 64 + 10 * 64**2 + 3 * 64,
        True,
    )
    with pytest.raises(UnsupportedModel, match="pre-tokenizer 'viking' is not supported"):
        check_base(str(tmp_path / "odd.gguf"))


def test_a_vision_checkpoint_is_checked_as_its_text_model(tmp_path):
    vision = {"vision_tower.vision_model.embeddings.patch_embedding.weight": (1152, 3, 14, 14)}
    text = {f"language_model.{name}": shape for name, shape in llama_tensors(LLAMA | {"head_dim": 64}).items()}
    config = {"model_type": "mistral3", "text_config": {**LLAMA, "model_type": "mistral"}, "vision_config": {}}
    del text["language_model.lm_head.weight"]
    check = check_base(write_directory(tmp_path / "mistral3", config, {**text, **vision}))
    assert (check.shape.architecture, check.parameters) == ("mistral3", 1_235_814_400)


def refused_directories(root):
    """Checkpoints that no device can train, and what is none, with the reasons."""
    tensors = llama_tensors(LLAMA)
    quantized = {re.sub(r"proj\.weight", "proj.qweight", name): shape for name, shape in tensors.items()}
    without = write_directory(root / "no-tokenizer", LLAMA, tensors)
    (root / "no-tokenizer" / "tokenizer.json").unlink()
    no_weights, adapter = root / "no-weights", root / "adapter"
    for directory in (no_weights, adapter):
        directory.mkdir()
    (no_weights / "config.json").write_text(json.dumps(QWEN3))
    (adapter / "adapter_config.json").write_text("{}")
    return {
        write_directory(root / "gptq", LLAMA, quantized): r"are quantized \(tensor .*qweight\); use .* in BF16 or F16",
        write_directory(root / "fp8", LLAMA, tensors, "F8_E4M3"): "is stored as F8_E4M3; convert the weights to BF16",
        write_directory(root / "sizes", {**LLAMA, "vocab_size": 32000}, tensors): "configuration requires .32000, 2048",
        write_directory(root / "moe", REFUSED["Mixtral-8x7B"][0], tensors): "it is a mixture of experts",
        without: r"no-tokenizer has no tokenizer\.json",
        f"{without}/model.safetensors": r"model\.safetensors is one file of a model; give its directory",
        str(no_weights): r"has no \.safetensors file; download it, or convert other weights",
        str(adapter): "is an adapter without its base model; give a Hugging Face model",
    }


def test_base_add_refuses_the_same_without_torch_and_before_hashing(tmp_path, monkeypatch):
    monkeypatch.setattr(base_module, "file_sha256", lambda path: pytest.fail(f"{path} is hashed"))
    directories = refused_directories(tmp_path)
    for source, message in directories.items():
        for check in (check_base, lambda source: inspect("tiny", source, None)):
            with pytest.raises((UnsupportedModel, UnreadableCheckpoint), match=message):
                check(source)
    script = "import sys; from server.catalog.bases import inspect\nfor source in sys.argv[1:]:\n"
    script += " try: inspect('tiny', source, None)\n except Exception as error: print(error)\n"
    script += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    command = [sys.executable, "-c", script, *directories]
    refusals = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [bool(re.search(message, line)) for message, line in zip(directories.values(), refusals, strict=True)] == [
        True
    ] * len(directories)


UNUSABLE = {
    "no heads": ({"num_attention_heads": 0}, "heads: Input should be greater than or equal to 1"),
    "key-value heads": ({"num_key_value_heads": 3}, "16 query heads are not a multiple of 3 key-value heads"),
    "billions of layers": ({"num_hidden_layers": 10**9}, "1000000000 layers; at most 1,000 are supported"),
    "negative layers": ({"num_hidden_layers": -3}, "-3 layers"),
    "a list in place of an object": ({"rope_parameters": [1, 2]}, "'list' object"),
    "a convolution of billions": (
        {"model_type": "lfm2", "conv_L_cache": 10**9},
        "conv_taps: Input should be less than or equal to 64",
    ),
    "too short a list": ({"model_type": "smollm3", "no_rope_layers": [1, 1]}, "index out of range"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_value_that_cannot_be_is_refused_in_one_sentence(hub, name):
    changed, message = UNUSABLE[name]
    (hub / "config.json").write_text(json.dumps({**QWEN3, **changed}))
    with pytest.raises(UnreadableCheckpoint, match=f"config.json lacks a usable value: .*{message}") as refused:
        check_base("acme/qwen3")
    assert "\n" not in refused.value.detail
