"""Encoding of what a model is to write; stock transformers is the oracle for conversations."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shared.errors import InvalidDataset, InvalidTask
from shared.task import Task
from shared.zo.encoding import pack_score, pack_step
from shared.zo.writing import Encoder, WritingStyle

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi there."},
    {"role": "assistant", "content": "Good morning, you."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Well."},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken("<s>"), AddedToken("<|im_start|>"), AddedToken(END)])
    return made


def with_opening(tokenizer):
    made = Tokenizer.from_str(tokenizer.to_str())
    opening = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", opening)])
    return made


def render(messages, *, answer):
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(PLAIN)
    return template.render(messages=messages, add_generation_prompt=answer)


def encoder(tokenizer, recipe, task, **settings):
    sizes = {"sequence_length": 200, "answer_length": 100, "choices": 1, "loss": "full"} | settings
    style = WritingStyle(tokenizer.token_to_id(END), render)
    return Encoder(task, tokenizer, recipe.model_copy(update=sizes), style)


def counted(row):
    return [token for _, token in row.targets]


COMPLETION = Task(name="reply", kind="completion", prompt="Q: {q}\nA:", answer=" {a}")
TEXT = Task(name="diary", kind="text")
MESSAGES = Task(name="talk", kind="messages")


def test_a_completion_counts_its_answer_and_the_end(tokenizer, recipe):
    (example,) = encoder(tokenizer, recipe, COMPLETION).encode({"q": "two?", "a": "2"}, "f:1")
    ids = tokenizer.encode("Q: two?\nA: 2").ids
    assert example.right.prompt == tuple(ids[:-2])
    assert counted(example.right) == [*ids[-2:], tokenizer.token_to_id(END)]
    with pytest.raises(InvalidDataset, match="answer_length is 3"):
        encoder(tokenizer, recipe, COMPLETION, answer_length=3).encode({"q": "two?", "a": "two"}, "f:1")
    for record, message in (({"q": "two?"}, "'a' is missing"), ({"q": "two?", "a": ""}, "blank")):
        with pytest.raises(InvalidDataset, match=message):
            encoder(tokenizer, recipe, COMPLETION).encode(record, "f:1")


@pytest.mark.parametrize("opening", [False, True])
@pytest.mark.parametrize(("length", "answer"), [(9, 8), (12, 5), (100, 50)])
def test_each_token_of_a_document_counts_once(tokenizer, recipe, opening, length, answer):
    own = with_opening(tokenizer) if opening else tokenizer
    text = "It was a bright cold day."
    made = encoder(own, recipe, TEXT, sequence_length=length, answer_length=answer).encode({"text": text}, "f:1")
    whole = [*own.encode(text).ids, own.token_to_id(END)]
    assert [token for example in made for token in counted(example.right)] == whole[1:]
    for example in made:
        assert len(example.right.tokens) <= length
        assert not opening or example.right.prompt[0] == own.token_to_id("<s>")
    # A later piece sees as many tokens before it as there are, and as there is room for.
    for number, example in enumerate(made[:-1], 1):
        assert len(example.right.tokens) == min(length, number * answer)


@pytest.mark.parametrize("length", [200, 60])
def test_a_conversation_counts_the_assistants_turns_as_transformers_does(tokenizer, recipe, length):
    (example,) = encoder(tokenizer, recipe, MESSAGES, sequence_length=length).encode({"messages": TALK}, "f:1")
    stock = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found = stock.apply_chat_template(
        TALK, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    last = len(mask) - mask[::-1].index(1)
    first = max(last - length - 1, 0)
    assert [*example.right.tokens, example.right.answer[-1]] == ids[first:last]
    assert counted(example.right) == [
        token for place, (token, one) in enumerate(zip(ids, mask, strict=True)) if one and place > first
    ]
    for position, token in example.right.targets:
        assert ([*example.right.tokens, example.right.answer[-1]])[position + 1] == token


def test_a_conversation_with_too_many_answer_tokens_counts_the_last(tokenizer, recipe):
    (example,) = encoder(tokenizer, recipe, MESSAGES, answer_length=4).encode({"messages": TALK}, "f:1")
    assert counted(example.right) == [*tokenizer.encode("ell.").ids[-3:], tokenizer.token_to_id(END)]
    assert example.truncated


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "list of messages"),
        ([], "list of messages"),
        ([{"role": "user", "content": "x"}], "no turn of the assistant"),
        ([{"role": "robot", "content": "x"}], "none of system"),
        ([{"role": "assistant"}], "role and content"),
        ([{"role": "assistant", "content": [{"type": "text"}]}], "role and content"),
    ],
)
def test_what_is_no_conversation_says_why(tokenizer, recipe, messages, message):
    with pytest.raises(InvalidDataset, match=message):
        encoder(tokenizer, recipe, MESSAGES).encode({"messages": messages}, "f:1")


def test_a_base_without_a_chat_template_takes_no_conversations(tokenizer, recipe):
    with pytest.raises(InvalidTask, match="no chat template"):
        Encoder(MESSAGES, tokenizer, recipe)


def test_what_does_not_count_is_packed_nowhere(tokenizer, recipe):
    made = encoder(tokenizer, recipe, MESSAGES, effective_batch=2)
    (example,) = made.encode({"messages": TALK}, "f:1")
    tokens, positions, answers, mask = pack_step([example], made.recipe)
    count = len(example.right.targets)
    assert mask.sum() == count
    assert answers[0, :count].tolist() == counted(example.right)
    assert (tokens[0, positions[0, 1:count]] == answers[0, : count - 1]).sum() >= count - 2  # but at a turn's begin
    (batch,) = pack_score([example], made.recipe)
    ((cells,),) = batch.cells
    assert len(cells) == count
    assert batch.inputs[2][0, :count, 0].tolist() == counted(example.right)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "completion", "prompt": "x"}, "needs answer"),
        ({"kind": "completion", "answer": "x"}, "needs prompt"),
        ({"kind": "text", "prompt": "x"}, "has no prompt"),
        ({"kind": "messages", "answer": "x"}, "has no answer"),
        ({"kind": "text", "metric": "accuracy"}, "metric accuracy is not one of kind text; choose loss"),
        ({"kind": "completion", "prompt": "x", "answer": "{a.b!r}"}, "only fields such as"),
        ({"prompt": "x", "answers": [{"text": "y", "labels": ["y"]}]}, "at least 2 answers"),
        ({"prompt": "x"}, "needs answers"),
    ],
)
def test_a_task_says_what_its_kind_needs(fields, message):
    with pytest.raises(ValueError, match=message):
        Task.model_validate({"name": "t", **fields})


def test_tasks_that_choose_keep_their_bytes():
    answers = [{"text": " a", "labels": ["0"]}, {"text": " b", "labels": ["1"]}]
    found = json.loads(Task(name="t", prompt="x", answers=answers).model_dump_json())
    assert sorted(found) == ["answers", "label_field", "mapped", "metric", "name", "prompt"]
