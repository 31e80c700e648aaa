"""Encoding of texts to write; transformers is the reference for conversations."""

from dataclasses import replace

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shared.chat_template import ChatTemplate
from shared.errors import InvalidDataset, InvalidTask
from shared.task import Task
from shared.zo.packing import pack_score, pack_step
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


def spelled(tokenizer, tokens):
    return decoders.ByteLevel().decode([tokenizer.id_to_token(token) for token in tokens])


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


BOS_TEMPLATE = "{{ bos_token }}" + TEMPLATE
# Qwen 3 writes an empty thought before the last turn alone, Phi 3 an end-of-text token after the last turn alone.
THINKING_TEMPLATE = TEMPLATE.replace(
    "{% generation %}{{ message['content'] }}",
    "{% generation %}{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)
ENDING_TEMPLATE = TEMPLATE.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<s>{% endif %}",
)
OPEN_TEMPLATE = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def sentencepiece_tokenizer():
    """A BPE as converted SentencePiece models have it: `▁` before the text and instead of spaces."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "<|im_start|>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["Good morning, you. Yes, Well. assistant user"] * 9, trainer)
    return tokenizer


def chat_encoder(tokenizer, recipe, template, **settings):
    """An encoder by a template as the product renders it, and transformers' ids and mask of CONVERSATION."""
    chat_template = ChatTemplate(template=template, tokens={"bos_token": "<s>"})
    ends = (tokenizer.token_to_id(END), tokenizer.token_to_id("<s>"))
    text_format = TextFormat(ends[0], chat_template.render, ends)
    sizes = {"sequence_length": 300, "answer_length": 200, "choices": 1, "loss": "full"} | settings
    stock = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    reference = stock.apply_chat_template(
        CONVERSATION, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    record_encoder = Encoder(MESSAGES, tokenizer, recipe.model_copy(update=sizes), text_format)
    return record_encoder, reference["input_ids"], reference["assistant_masks"]


@pytest.mark.parametrize("make", [with_bos, lambda tokenizer: tokenizer, lambda _: sentencepiece_tokenizer()])
@pytest.mark.parametrize("template", [BOS_TEMPLATE, TEMPLATE])
def test_a_conversation_is_tokenized_as_one_text(tokenizer, recipe, make, template):
    """BOS is where the template writes it, and nowhere else."""
    record_encoder, ids, mask = chat_encoder(make(tokenizer), recipe, template)
    (example,) = record_encoder.encode({"messages": CONVERSATION}, "f:1")
    last = len(mask) - mask[::-1].index(1)
    row = example.correct_row
    assert [*row.tokens, row.answer[-1]] == ids[:last]
    assert [position + 1 for position, _ in row.targets] == [at for at, each in enumerate(mask) if each]


def test_a_cut_conversation_keeps_only_a_bos_that_its_template_writes(tokenizer, recipe):
    bos_tokenizer = with_bos(tokenizer)
    bos = bos_tokenizer.token_to_id("<s>")
    for template, first in ((BOS_TEMPLATE, True), (TEMPLATE, False)):
        record_encoder, ids, mask = chat_encoder(bos_tokenizer, recipe, template, sequence_length=40)
        (example,) = record_encoder.encode({"messages": CONVERSATION}, "f:1")
        row, last = example.correct_row, len(mask) - mask[::-1].index(1)
        assert (row.tokens[0] == bos) == first
        assert row.tokens.count(bos) == first
        assert [*row.tokens[1:], row.answer[-1]] == ids[last - 40 : last]
        begin = last - 40 + first  # what follows a BOS that was moved there does not count
        assert counted(row) == [token for at, token in enumerate(ids) if mask[at] and begin <= at]


@pytest.mark.parametrize(
    ("template", "turns"), [(THINKING_TEMPLATE, ["<think>\n\n</think>\n\nWell."]), (ENDING_TEMPLATE, None)]
)
def test_turns_count_that_are_written_as_they_are_asked_for(tokenizer, recipe, template, turns):
    record_encoder, ids, _ = chat_encoder(tokenizer, recipe, template)
    (example,) = record_encoder.encode({"messages": CONVERSATION}, "f:1")
    text = "".join(f"{turn}{END}" for turn in turns or ["Good morning, you.", "Well."])
    assert spelled(tokenizer, counted(example.correct_row)) == text
    row = example.correct_row
    assert [*row.tokens, row.answer[-1]] == ids[: len(row.tokens) + 1]


def test_a_template_that_asks_for_no_turn_as_it_is_written_is_refused(tokenizer, recipe):
    record_encoder, _, _ = chat_encoder(tokenizer, recipe, OPEN_TEMPLATE)
    with pytest.raises(InvalidDataset, match="no turn of the assistant after the text that asks for it"):
        record_encoder.encode({"messages": CONVERSATION}, "f:1")


def test_a_conversation_that_the_template_refuses_does_not_fit(tokenizer, recipe):
    template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + TEMPLATE
    record_encoder, _, _ = chat_encoder(tokenizer, recipe, TEMPLATE)
    refusing = ChatTemplate(template=template).render
    record_encoder = replace(record_encoder, text_format=replace(record_encoder.text_format, render=refusing))
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(InvalidDataset, match="f:1: the chat template does not take these messages: no system"):
        record_encoder.encode({"messages": messages}, "f:1")


def test_messages_are_read_as_others_write_them(tokenizer, recipe):
    record_encoder, _, _ = chat_encoder(tokenizer, recipe, TEMPLATE)
    calls = [{"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"from": "gpt", "value": "No idea.", "weight": 0},  # of ShareGPT
        {"role": "assistant", "content": parts, "weight": 1},
    ]
    (example,) = record_encoder.encode({"messages": messages}, "f:1")
    row = example.correct_row
    assert spelled(tokenizer, counted(row)) == f"It rains.{END}"
    text = spelled(tokenizer, row.tokens)
    assert text.startswith(f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nWeather?{END}\n")
    assert f"<|im_start|>assistant\n{END}\n<|im_start|>tool\nrain{END}\n" in text
    assert "None" not in text


def test_a_record_with_a_token_beyond_the_embedding_table_does_not_fit(tokenizer, recipe):
    known = tokenizer.token_to_id(END)
    sizes = {"sequence_length": 40, "answer_length": 20, "choices": 1, "loss": "full"}
    record_encoder = Encoder(TEXT, tokenizer, recipe.model_copy(update=sizes), TextFormat(vocabulary=known))
    assert record_encoder.encode({"text": "Hi there."}, "f:1")
    with pytest.raises(InvalidDataset, match=rf"f:2: the text has the token {known}, .* has {known} rows"):
        record_encoder.encode({"text": f"Hi{END} there."}, "f:2")


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
    (plan,) = batch.plans
    (cells,) = plan.terms
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


PAIRS = Task(name="style", kind="preference", prompt="Q: {prompt}\nA:")


def test_a_preference_of_texts_has_one_prompt_that_leaves_room_for_the_longer_answer(tokenizer, recipe):
    record = {"prompt": "two and two", "chosen": " 4", "rejected": " I do not care"}
    (example,) = encoder(tokenizer, recipe, PAIRS, loss="dpo").encode(record, "f:1")
    first, second = example.rows
    assert spelled(tokenizer, counted(first)) == f" 4{END}"
    assert spelled(tokenizer, counted(second)) == f" I do not care{END}"
    assert not example.truncated
    (cut,) = encoder(tokenizer, recipe, PAIRS, loss="dpo", sequence_length=20).encode(record, "f:1")
    assert cut.truncated
    assert cut.rows[0].prompt == cut.rows[1].prompt == first.prompt[-(20 - len(second.answer) + 1) :]
    with pytest.raises(InvalidDataset, match="f:1: an answer has 15 tokens; the recipe's answer_length is 14"):
        encoder(tokenizer, recipe, PAIRS, loss="dpo", answer_length=14).encode(record, "f:1")


def test_a_preference_of_conversations_counts_only_what_differs(tokenizer, recipe):
    task = Task(name="style", kind="preference")
    record = {"chosen": CONVERSATION, "rejected": [*CONVERSATION[:-1], {"role": "assistant", "content": "Why?"}]}
    (example,) = encoder(tokenizer, recipe, task, loss="dpo").encode(record, "f:1")
    first, second = example.rows
    assert spelled(tokenizer, counted(first)) == f"Well.{END}"
    assert spelled(tokenizer, counted(second)) == f"Why?{END}"
    assert first.prompt == second.prompt
    assert spelled(tokenizer, first.prompt) == render(CONVERSATION[:-1], answer=True)
    plain = Encoder(task, tokenizer, recipe.model_copy(update={"loss": "dpo"}))
    with pytest.raises(InvalidDataset, match="has messages, but the base has no chat template"):
        plain.encode(record, "f:1")
