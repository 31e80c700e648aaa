"""Tokenizers are read so that a prompt can be continued, whatever is saved in their files."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.tokenizer import UnknownToken, check_known, read_tokenizer, token_bytes

WORDS = {"[UNK]": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 30)}}
TEXT = "w3 w4 w5 w6 w7 w8 w9"
IDS = [3, 4, 5, 6, 7, 8, 9]


def words(processor=None):
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def read(tokenizer):
    return read_tokenizer(tokenizer.to_str().encode())


def template(single):
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])


def test_saved_truncation_and_padding_are_off():
    tokenizer = words()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    assert read(tokenizer).encode(TEXT).ids == IDS
    assert read(tokenizer).encode_batch([TEXT, "w3"])[1].ids == [3]


@pytest.mark.parametrize(
    ("processor", "front"),
    [
        (template("$A </s>"), []),
        (template("<s> $A </s>"), [1]),
        (template("<s> $A"), [1]),
        (processors.BertProcessing(("</s>", 2), ("<s>", 1)), [1]),
        (processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), [1]),
        (processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s> $A </s>")]), [1]),
        (processors.ByteLevel(), []),
    ],
)
def test_special_tokens_are_added_at_the_front_only(processor, front):
    tokenizer = read(words(processor))
    assert tokenizer.encode(TEXT).ids == [*front, *IDS]
    assert tokenizer.encode("").ids == front
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == IDS


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(kind):
    text = " it it's é漢字🙂  two\nlines<s>x"
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>"]
        )
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator(["it it's two lines it it"], trainer)
    tokens = read(tokenizer).encode(text).ids
    pieces = [token_bytes(tokenizer, token) for token in tokens]
    assert b"".join(pieces).decode() == text
    assert len({piece for piece in pieces if piece.strip() == b"it"}) == len(
        {token for token, piece in zip(tokens, pieces, strict=True) if piece.strip() == b"it"}
    )
    assert any(b"\xf0\x9f".startswith(piece) for piece in pieces)  # of a part of a character


def test_a_token_without_a_row_is_refused():
    check_known([0, 29], 30, "prompt:")
    with pytest.raises(UnknownToken, match=r"prompt: has the token 30, but .* has 30 rows"):
        check_known([0, 30, 31], 30, "prompt:")
