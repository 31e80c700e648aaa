"""Tokens become text piece by piece, and no piece shows half a character."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.text_stream import REPLACEMENT_CHARACTER, TextStream


@functools.cache
def byte_level():
    """GPT-2's kind: bytes as letters, no merges, so every character beyond ASCII is several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_fallback():
    """Llama 2's kind: letters and a mark for spaces, any other character byte by byte; decoding drops a first space."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def stream_text(tokenizer, before, tokens):
    stream = TextStream(tokenizer, before)
    return [stream.push(token) for token in tokens], stream.flush()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters=REPLACEMENT_CHARACTER), max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_make_the_text_and_none_shows_half_a_character(make, text):
    tokenizer = make()
    before = tokenizer.encode("so ").ids
    tokens = tokenizer.encode("so " + text).ids[len(before) :]
    pieces, rest = stream_text(tokenizer, before, tokens)
    # Llama 2's kind spells a text by its own decoder; spaces that stand in the text itself come back as such.
    assert "".join(pieces) + rest == text.replace("\u2581", " " if make is byte_fallback else "\u2581")
    assert rest == ""
    assert REPLACEMENT_CHARACTER not in "".join(pieces)


def test_each_character_comes_with_its_last_byte():
    tokenizer = byte_level()
    pieces, rest = stream_text(tokenizer, [], tokenizer.encode("aé€😀").ids)
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    assert rest == ""


def test_bytes_that_are_no_character_are_shown_when_more_text_follows_or_none_does():
    tokenizer = byte_level()
    euro = tokenizer.encode("€").ids
    pieces, rest = stream_text(tokenizer, [], [*euro[:2], *tokenizer.encode("ab").ids, euro[0]])
    assert pieces == ["", "", REPLACEMENT_CHARACTER + "a", "b", ""]
    assert rest == REPLACEMENT_CHARACTER
