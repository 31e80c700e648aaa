"""Conversations with a kept adapter: the tokens that the model reads, and its answers as text, piece by piece."""

import dataclasses

import pytest
from tokenizers import AddedToken, Tokenizer

from device_agent.inference.chat import Chat
from device_agent.inference.personal_model import PersonalModel, open_personal
from shared.chat_template import ChatTemplate
from shared.errors import BadRequest
from tests.device_agent.use import keep_adapter

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
CHATML = ChatTemplate(
    template="{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
        def generate(self, tokens, most, sampler):
            prompts.append(list(tokens))
            return model.inference.generate(tokens, most, sampler)

    return PersonalModel(model.name, model.task, model.manifest, tokenizer, Listening()), prompts


def test_a_special_token_and_one_that_the_bases_files_name_end_the_answer_and_are_not_shown(model):
    start = model.tokenizer.encode("it").ids
    tokens = [each.token for each in model.inference.generate(start, 12)]
    end = next(place for place, token in enumerate(tokens) if token not in tokens[:place] + start and place > 1)
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.add_special_tokens([tokenizer.id_to_token(tokens[end])])
    unused = model.manifest.shape.vocabulary - 1
    named = [
        model.manifest.model_copy(update=update)
        for update in ({"stop_tokens": (unused, tokens[end])}, {"end_of_text": tokens[end]})
    ]
    for changes in ({"tokenizer": tokenizer}, *({"manifest": manifest} for manifest in named)):
        chat = Chat(dataclasses.replace(model, **changes), None, max_tokens=12)
        assert "".join(chat.answer("it")) == model.tokenizer.decode(tokens[:end])
        assert chat.ended == "the answer is complete"


def test_a_conversation_is_written_by_the_template(model):
    marked, prompts = with_marks(model)
    chat = Chat(marked, CHATML, max_tokens=3)
    first = "".join(chat.answer("a"))
    list(chat.answer("b"))
    turns = (("user", "a"), ("assistant", first), ("user", "b"))
    assert chat.prompt == [{"role": role, "content": content} for role, content in turns]
    opening = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0] == marked.tokenizer.encode(opening.format("a")).ids
    assert prompts[1] == marked.tokenizer.encode(f"{opening.format('a')}{first}<|im_end|>\n{opening.format('b')}").ids
    tokens = [each.token for each in model.inference.generate(prompts[0], 3)]
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
