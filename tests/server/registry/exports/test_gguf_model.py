"""Merged models as GGUF files: llama.cpp loads them and answers as transformers does with the merged model."""

import dataclasses
import json
import urllib.request

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.checkpoints.gguf_file import GgufFile
from server.registry.exports.gguf_model import merge_gguf
from server.registry.exports.gguf_vocabulary import LLAMA3_SPLIT, QWEN2_SPLIT
from server.registry.exports.merge import merge
from shared.errors import BaseMismatch, UnsupportedFormat
from shared.protocol import MergedForm
from tests.server.compiler.conftest import eager_logits
from tests.server.registry.exports.stock import ADAPTED, LlamaCpp, adapted, make_base, next_token, prompts, write_gguf

WORDS = "the cat sat on 12 mats, then 345 dogs ran; it's fun"
OTHER_WORDS = "it's a cat; then the dogs ran on 345 12 mats, 3 sat"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text-deep")


def train_tokenizer(name):
    """A BPE of fewer than VOCABULARY tokens, split as the models of that family split a text."""
    special = ["<s>", "</s>", "<unk>"]
    if name.startswith("gemma"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Replace("\u2581", " ")
    else:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT if name == "llama" else QWEN2_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


def with_tokenizer(tmp_path, name):
    """A base with such a tokenizer and a chat template, and that tokenizer."""
    base = make_base(tmp_path / "base", name)
    tokenizer = train_tokenizer(name)
    tokenizer.save(str(base.directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
    (base.directory / "tokenizer_config.json").write_text(json.dumps(config))
    return adapted(
        base.directory, str(base.directory), ADAPTED.get(name, {"targets": ("q_proj", "down_proj")})
    ), tokenizer


def write_merged(base, directory, form, source=None):
    """The path of the merged model."""
    (file,) = merge_gguf(*arguments(base), str(source or base.directory), directory, form)
    assert (directory / file.path).stat().st_size == file.size
    return directory / file.path


def arguments(base):
    return base.recipe, base.shape, base.flat, base.a_sha256


def round_weights(directory, kind):
    """The merged directory's model, its matrices rounded as the file's are."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 2:
                of_row = kind if tensor.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F16
                values = gguf.dequantize(gguf.quantize(tensor.numpy(), of_row), of_row)
                tensor.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def llama_cpps_tokens(llama, text):
    body = json.dumps({"content": text, "add_special": False}).encode()
    request = urllib.request.Request(
        f"{llama.server.listening_address}/tokenize", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


@pytest.mark.parametrize("name", [*FAMILIES[:-1], pytest.param(FAMILIES[-1], marks=pytest.mark.slow)])
def test_llama_cpp_answers_as_transformers_with_the_merged_model(tmp_path, name):
    base, tokenizer = with_tokenizer(tmp_path, name)
    merge(*arguments(base), str(base.directory), tmp_path / "directory")
    tokens = prompts(20, 12)
    expected = next_token(AutoModelForCausalLM.from_pretrained(tmp_path / "directory").eval(), tokens)
    assert np.abs(expected - next_token(base.model(), tokens)).max() > 0.1  # the adapter does something
    for form, kind in ((MergedForm.GGUF_F16, "F16"), (MergedForm.GGUF_Q8_0, "Q8_0")):
        path = write_merged(base, tmp_path / form, form)
        exact = next_token(round_weights(tmp_path / "directory", gguf.GGMLQuantizationType[kind]), tokens)
        decoded = eager_logits(load_checkpoint(str(path)), torch.from_numpy(tokens))[:, -1]
        np.testing.assert_allclose(torch.log_softmax(decoded, -1), exact, atol=1e-3)
        llama = LlamaCpp(path)  # it rounds the other factor of each product, too
        tops = [llama.top(row) for row in tokens]
        if kind == "F16":
            assert [token for token, _ in tops] == expected.argmax(1).tolist()
        np.testing.assert_allclose([value for _, value in tops], exact.max(1), atol=0.05 if kind == "F16" else 0.5)
        assert llama_cpps_tokens(llama, OTHER_WORDS) == tokenizer.encode(OTHER_WORDS).ids


def test_a_gguf_base_keeps_its_vocabulary_and_settings(tmp_path):
    stock = make_base(tmp_path / "stock", "llama-tied")
    source = write_gguf(stock, tmp_path / "base.gguf")
    base = adapted(source, str(source), ADAPTED["llama-tied"])
    path = write_merged(base, tmp_path / "merged", MergedForm.GGUF_F16, source)
    merge(*arguments(base), str(source), tmp_path / "directory")
    tokens = prompts(20, 12)
    expected = next_token(AutoModelForCausalLM.from_pretrained(tmp_path / "directory").eval(), tokens)
    llama = LlamaCpp(path)
    assert [llama.top(row)[0] for row in tokens] == expected.argmax(1).tolist()
    before, after = GgufFile.read(source).metadata, GgufFile.read(path).metadata
    assert after.items() >= before.items()
    assert after["mobizo.base_sha256"] == base.recipe.base.sha256
    assert write_merged(base, tmp_path / "again", MergedForm.GGUF_F16, source).read_bytes() == path.read_bytes()


def test_what_llama_cpp_lacks_is_refused(tmp_path):
    plain = make_base(tmp_path / "plain", "llama")
    with pytest.raises(UnsupportedFormat, match=r"kind WordLevel, not BPE; register the base as a GGUF file"):
        write_merged(plain, tmp_path / "a", MergedForm.GGUF_F16)
    opt = make_base(tmp_path / "opt", "opt")
    with pytest.raises(UnsupportedFormat, match="'opt'"):
        write_merged(opt, tmp_path / "b", MergedForm.GGUF_F16)
    other = plain.recipe.base.model_copy(update={"sha256": "0" * 64})
    spoiled = dataclasses.replace(plain, recipe=plain.recipe.model_copy(update={"base": other}))
    with pytest.raises(BaseMismatch):
        write_merged(spoiled, tmp_path / "c", MergedForm.GGUF_F16)
    (tmp_path / "gemma").mkdir()
    gemma, _ = with_tokenizer(tmp_path / "gemma", "gemma3_text-deep")
    config = json.loads((gemma.directory / "config.json").read_text())
    config["layer_types"] = ["full_attention", *config["layer_types"][1:]]
    (gemma.directory / "config.json").write_text(json.dumps(config))
    gemma = adapted(gemma.directory, str(gemma.directory), {"targets": ("q_proj",)})
    with pytest.raises(UnsupportedFormat, match="other values of sliding_layers"):
        write_merged(gemma, tmp_path / "d", MergedForm.GGUF_F16)


def test_a_pre_tokenizer_without_a_name_is_refused(tmp_path):
    base, tokenizer = with_tokenizer(tmp_path, "llama")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])
    tokenizer.save(str(base.directory / "tokenizer.json"))
    base = adapted(base.directory, str(base.directory), {"targets": ("q_proj",)})
    with pytest.raises(UnsupportedFormat, match="pre-tokenizer is not known here"):
        write_merged(base, tmp_path / "merged", MergedForm.GGUF_F16)
