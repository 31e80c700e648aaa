"""Conversations with a kept adapter: the tokens that the model reads, and its answers as text, piece by piece."""

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from device_agent.inference.chat import CLOSE, OPEN, Chat, chatml, default_template
from device_agent.inference.personal_model import PersonalModel, open_personal
from shared.chat_template import CHATML, ChatTemplate
from shared.errors import BadRequest
from shared.text_stream import REPLACEMENT_CHARACTER, TextStream
from tests.device_agent.use import keep_adapter


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


@pytest.fixture
def model(home, rademacher, server_key):
    keep_adapter(home, rademacher, server_key)
    opened = open_personal(home, "alice-movies")
    yield opened
    opened.close()


def with_marks(model):
    """The model with ChatML's marks in its tokenizer, and what it was asked to go on with."""
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(OPEN, special=True), AddedToken(CLOSE, special=True)])
    assert tokenizer.get_vocab_size() <= model.manifest.shape.vocabulary
    prompts = []

    class Listening:
        def generate(self, tokens, most, **how):
            prompts.append(list(tokens))
            return model.inference.generate(tokens, most, **how)

    return PersonalModel(model.name, model.task, model.manifest, tokenizer, Listening()), prompts


def test_a_plain_text_is_gone_on_with_as_it_stands(model):
    tokens = list(model.inference.generate(model.tokenizer.encode("the plot was").ids, 12))
    chat = Chat(model, None, max_tokens=12)
    assert "".join(chat.answer("the plot was")) == model.tokenizer.decode(tokens)
    assert chat.ended == "12 tokens"


def test_a_special_token_ends_the_answer_and_is_not_shown(model):
    start = model.tokenizer.encode("it").ids
    tokens = list(model.inference.generate(start, 12))
    end = next(place for place, token in enumerate(tokens) if token not in tokens[:place] + start and place > 1)
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.add_special_tokens([tokenizer.id_to_token(tokens[end])])
    ending = PersonalModel(model.name, model.task, model.manifest, tokenizer, model.inference)
    chat = Chat(ending, None, max_tokens=12)
    assert "".join(chat.answer("it")) == model.tokenizer.decode(tokens[:end])
    assert chat.ended == "the answer is complete"


def test_a_conversation_is_written_by_the_template(model):
    marked, prompts = with_marks(model)
    chat = Chat(marked, CHATML, max_tokens=3)
    first = "".join(chat.answer("a"))
    list(chat.answer("b"))
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0] == marked.tokenizer.encode(opening.format("a")).ids
    assert prompts[1] == marked.tokenizer.encode(f"{opening.format('a')}{first}<|im_end|>\n{opening.format('b')}").ids
    tokens = list(itertools.islice(model.inference.generate(prompts[0], 3), 3))
    assert first == model.tokenizer.decode(tokens)


def test_an_answer_that_is_stopped_stays_in_the_conversation(model):
    marked, prompts = with_marks(model)
    chat = Chat(marked, CHATML, max_tokens=8)
    pieces = chat.answer("a")
    next(pieces)
    pieces.close()
    assert chat.ended == "stopped"
    list(chat.answer("b"))
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_the_oldest_turns_go_when_the_context_is_full(model):
    marked, prompts = with_marks(model)
    chat = Chat(marked, CHATML, max_tokens=4)
    for _ in range(6):
        list(chat.answer("ab"))
    assert chat.forgotten > 0
    assert all(len(tokens) + 3 <= marked.context for tokens in prompts)
    assert len(prompts[-1]) > len(prompts[0])


def test_a_text_that_leaves_less_room_gets_a_shorter_answer_and_one_without_room_is_refused(model):
    chat = Chat(model, None, max_tokens=50)
    text = "xyz" * 20  # 60 tokens of a context of 64
    assert len(model.tokenizer.encode(text).ids) == 60
    list(chat.answer(text))
    assert chat.ended == "the context is full"
    with pytest.raises(BadRequest, match="share 64"):
        chat.answer("xyz" * 30)


def test_the_template_is_the_programs_own_or_chatml_by_the_tokenizers_marks_and_the_bases_name(model):
    marked, _ = with_marks(model)

    def with_name(model, name, template=None):
        recipe = model.manifest.recipe
        recipe = recipe.model_copy(update={"base": recipe.base.model_copy(update={"name": name})})
        manifest = model.manifest.model_copy(update={"recipe": recipe, "chat_template": template})
        return dataclasses.replace(model, manifest=manifest)

    own = ChatTemplate(template="{{ messages[-1].content }}")
    assert default_template(with_name(model, "smollm2-135m-instruct"))[0] is None
    assert default_template(with_name(marked, "smollm2-135m-instruct"))[0] == CHATML
    assert default_template(with_name(marked, "smollm2-135m-instruct", own))[0] == own
    template, why = default_template(with_name(marked, "smollm2-135m"))
    assert template is None
    assert "--form chatml" in why
    with pytest.raises(BadRequest, match="--form plain"):
        chatml(model)
