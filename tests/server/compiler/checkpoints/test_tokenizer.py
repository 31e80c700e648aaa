"""The tokenizers of Hugging Face directories, as transformers reads them."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from server.compiler.checkpoints.base import BaseFiles
from server.compiler.checkpoints.tokenizer import end_tokens, write_tokenizer
from shared.errors import UnreadableCheckpoint
from shared.tokenizer import read_tokenizer

TEXTS = ("Hi there.", "<s>Hi</s> there", "", " a  b\n\n1 2 345 ", "<|im_start|>user\nHi<|im_end|>\n", "é ² 漢字 🙂")
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
STOP = {
    "__type": "AddedToken",
    "content": "<|im_end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}


@pytest.fixture
def base(tmp_path):
    """A directory with a byte-level tokenizer.json whose `<s>` and `</s>` begin and end every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(["Hi there. Hi you."], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory):
    path = directory / "written.json"
    write_tokenizer(BaseFiles("huggingface", directory, ()), path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        {},
        NAMED,
        NAMED | {"add_bos_token": False},
        NAMED | {"add_bos_token": True, "add_eos_token": True},
        NAMED | {"add_bos_token": None, "add_eos_token": False},
        {"add_bos_token": True},
        {"bos_token": "<|im_start|>", "eos_token": STOP, "add_bos_token": True},
        {"added_tokens_decoder": {"301": STOP | {"special": False}, "300": STOP | {"content": "<new>"}}},
        NAMED | {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        NAMED | {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    ],
)
def test_special_tokens_are_those_of_transformers(base, config):
    """An end-of-text token alone differs: a prompt is continued."""
    (base / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )
    stock, ours = AutoTokenizer.from_pretrained(base), read_tokenizer(write(base).read_bytes())
    for text in TEXTS:
        plain = stock(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False).ids == plain, text
        assert [*ours.encode(text).ids, ours.token_to_id("</s>")] == stock(text).input_ids, text


def test_a_tokenizer_that_nothing_changes_is_copied(base):
    (base / "tokenizer_config.json").write_text(json.dumps(NAMED), encoding="utf-8")
    assert write(base).read_bytes() == (base / "tokenizer.json").read_bytes()
    (base / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UnreadableCheckpoint, match=r"tokenizer\.json cannot be read"):
        write(base)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [5, 2, 5]}, None, (5, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (7, 2)),
        ({"eos_token_id": 2}, {"temperature": 1}, (2,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {"eos_token_id": [96, 3]}, (3,)),  # without a row in the embedding table
        ({"eos_token_id": True}, None, ()),
    ],
)
def test_the_tokens_that_end_a_text(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(BaseFiles("huggingface", tmp_path, ()), 96) == expected
