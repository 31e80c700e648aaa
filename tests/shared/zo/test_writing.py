"""Encoding of texts to write; transformers is the reference for conversations."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shared.errors import InvalidDataset, InvalidTask
from shared.task import Task
from shared.zo.encoding import pack_score, pack_step
from shared.zo.writing import Encoder, TextFormat

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_WITHOUT_MASK = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi there."},
    {"role": "assistant", "content": "Good morning, you."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Well."},
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("<|im_start|>"), AddedToken(END)])
    return tokenizer


def with_bos(tokenizer):
    copy = Tokenizer.from_str(tokenizer.to_str())
    bos = copy.token_to_id("<s>")
    copy.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return copy


def render(messages, *, answer):
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE_WITHOUT_MASK)
    return template.render(messages=messages, add_generation_prompt=answer)


def encoder(tokenizer, recipe, task, **settings):
    sizes = {"sequence_length": 200, "answer_length": 100, "choices": 1, "loss": "full"} | settings
    text_format = TextFormat(tokenizer.token_to_id(END), render)
    return Encoder(task, tokenizer, recipe.model_copy(update=sizes), text_format)


def counted(row):
    return [token for _, token in row.targets]


COMPLETION = Task(name="reply", kind="completion", prompt="Q: {q}\nA:", answer=" {a}")
TEXT = Task(name="diary", kind="text")
MESSAGES = Task(name="talk", kind="messages")


def test_a_completion_counts_its_answer_and_the_end(tokenizer, recipe):
    (example,) = encoder(tokenizer, recipe, COMPLETION).encode({"q": "two?", "a": "2"}, "f:1")
    ids = tokenizer.encode("Q: two?\nA: 2").ids
    assert example.correct_row.prompt == tuple(ids[:-2])
    assert counted(example.correct_row) == [*ids[-2:], tokenizer.token_to_id(END)]
    with pytest.raises(InvalidDataset, match="answer_length is 3"):
        encoder(tokenizer, recipe, COMPLETION, answer_length=3).encode({"q": "two?", "a": "two"}, "f:1")
    for record, message in (({"q": "two?"}, "'a' is missing"), ({"q": "two?", "a": ""}, "blank")):
        with pytest.raises(InvalidDataset, match=message):
            encoder(tokenizer, recipe, COMPLETION).encode(record, "f:1")


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("length", "answer"), [(9, 8), (12, 5), (100, 50)])
def test_each_token_of_a_document_counts_once(tokenizer, recipe, bos, length, answer):
    bos_tokenizer = with_bos(tokenizer) if bos else tokenizer
    text = "It was a bright cold day."
    examples = encoder(bos_tokenizer, recipe, TEXT, sequence_length=length, answer_length=answer).encode(
        {"text": text}, "f:1"
    )
    tokens = [*bos_tokenizer.encode(text).ids, bos_tokenizer.token_to_id(END)]
    assert [token for example in examples for token in counted(example.correct_row)] == tokens[1:]
    for example in examples:
        assert len(example.correct_row.tokens) <= length
        assert not bos or example.correct_row.prompt[0] == bos_tokenizer.token_to_id("<s>")
    # A later piece sees as many preceding tokens as exist and fit.
    for number, example in enumerate(examples[:-1], 1):
        assert len(example.correct_row.tokens) == min(length, number * answer)


@pytest.mark.parametrize("length", [200, 60])
def test_a_conversation_counts_the_assistants_turns_as_transformers_does(tokenizer, recipe, length):
    (example,) = encoder(tokenizer, recipe, MESSAGES, sequence_length=length).encode({"messages": CONVERSATION}, "f:1")
    reference_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    reference = reference_tokenizer.apply_chat_template(
        CONVERSATION, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = reference["input_ids"], reference["assistant_masks"]
    last = len(mask) - mask[::-1].index(1)
    first = max(last - length - 1, 0)
    assert [*example.correct_row.tokens, example.correct_row.answer[-1]] == ids[first:last]
    assert counted(example.correct_row) == [
        token
        for position, (token, is_answer) in enumerate(zip(ids, mask, strict=True))
        if is_answer and position > first
    ]
    for position, token in example.correct_row.targets:
        assert ([*example.correct_row.tokens, example.correct_row.answer[-1]])[position + 1] == token


def test_a_conversation_with_too_many_answer_tokens_counts_the_last(tokenizer, recipe):
    (example,) = encoder(tokenizer, recipe, MESSAGES, answer_length=4).encode({"messages": CONVERSATION}, "f:1")
    assert counted(example.correct_row) == [*tokenizer.encode("ell.").ids[-3:], tokenizer.token_to_id(END)]
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
def test_invalid_conversations_are_rejected_with_the_reason(tokenizer, recipe, messages, message):
    with pytest.raises(InvalidDataset, match=message):
        encoder(tokenizer, recipe, MESSAGES).encode({"messages": messages}, "f:1")


def test_conversations_need_a_chat_template(tokenizer, recipe):
    with pytest.raises(InvalidTask, match="no chat template"):
        Encoder(MESSAGES, tokenizer, recipe)


def test_uncounted_tokens_are_not_packed(tokenizer, recipe):
    record_encoder = encoder(tokenizer, recipe, MESSAGES, effective_batch=2)
    (example,) = record_encoder.encode({"messages": CONVERSATION}, "f:1")
    tokens, positions, answers, mask = pack_step([example], record_encoder.recipe)
    count = len(example.correct_row.targets)
    assert mask.sum() == count
    assert answers[0, :count].tolist() == counted(example.correct_row)
    assert (
        tokens[0, positions[0, 1:count]] == answers[0, : count - 1]
    ).sum() >= count - 2  # except at the start of a turn
    (batch,) = pack_score([example], record_encoder.recipe)
    ((cells,),) = batch.cells
    assert len(cells) == count
    assert batch.inputs[2][0, :count, 0].tolist() == counted(example.correct_row)


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
def test_a_task_requires_the_fields_of_its_kind(fields, message):
    with pytest.raises(ValueError, match=message):
        Task.model_validate({"name": "t", **fields})


def test_tasks_that_choose_keep_their_bytes():
    answers = [{"text": " a", "labels": ["0"]}, {"text": " b", "labels": ["1"]}]
    fields = json.loads(Task(name="t", prompt="x", answers=answers).model_dump_json())
    assert sorted(fields) == ["answers", "label_field", "mapped", "metric", "name", "prompt"]
