import pytest
from pydantic import ValidationError

from shared.errors import InvalidDataset, InvalidTask
from shared.task import Answer, Task
from shared.task_records import accepted_answers, read_completion, read_messages, read_preference, read_question
from shared.task_templates import TASKS, named_task

# Table 6 of the paper, filled in; docs/paper.md says where a line break was decided.
WORDINGS = {
    "sst2": ({"text": "A fine film.", "label": "positive"}, "A fine film. It was", " great"),
    "rte": (
        {"premise": "P.", "hypothesis": "H", "label": 0},
        'P. Does this mean that "H" is true? Yes or No?\n',
        "Yes",
    ),
    "mrpc": (
        {"sentence1": "A", "sentence2": "B", "label": 1},
        "Do the following two sentences mean the same thing? Yes or No?\nSentence 1: A\nSentence 2: B\n",
        "Yes",
    ),
    "qqp": (
        {"question1": "A", "question2": "B", "label": 0},
        "Are these two questions asking the same thing? Yes or No?\nQuestion 1: A\nQuestion 2: B\n",
        "No",
    ),
    "qnli": (
        {"question": "A", "sentence": "B", "label": "entailment"},
        "Does this sentence answer the question? Yes or No?\nSentence 1: A\nSentence 2: B\n",
        "Yes",
    ),
    "wnli": (
        {"sentence1": "A", "sentence2": "B", "label": 0},
        "Given the first sentence, is the second sentence true? Yes or No?\nSentence 1: A\nSentence 2: B\n",
        "No",
    ),
    "boolq": ({"passage": "P.", "question": "is it", "label": True}, "P. is it?\n", "Yes"),
    "wsc": (
        {"text": "T.", "span1_text": "Ann", "span2_text": "she", "label": 0},
        'T. In the previous sentence, does the pronoun "she" refer to Ann?\n',
        "No",
    ),
    "wic": (
        {"word": "w", "sentence1": "A", "sentence2": "B", "label": False},
        'Does the word "w" have the same meaning in these two sentences? Yes, No?\nA\nB\n',
        "No",
    ),
    "multirc": (
        {"paragraph": "P.", "question": "Q?", "answer": "A", "label": 1},
        'P.\nQuestion: Q?\nI found this answer "A". Is that correct? Yes or No?\n',
        "Yes",
    ),
    "copa": (
        {"premise": "He fell", "question": "cause", "choice1": "he ran", "choice2": "he slipped", "label": 1},
        "He fell because",
        " he slipped",
    ),
    "winogrande": (
        {
            "context": "It does not fit as",
            "option1": "the box",
            "option2": "the bag",
            "object": "is big",
            "answer": "1",
        },
        "It does not fit as the box",
        " is big",
    ),
    "arc": (
        {"question": "Q?", "op1": "a", "op2": "b", "op3": "c", "op4": "d", "label": "C"},
        "Pick the most correct option to answer the following question: Q?\nOptions: a, b, c, d\nAnswer:",
        " c",
    ),
}


@pytest.mark.parametrize("name", WORDINGS)
def test_the_papers_wordings(name):
    record, prompt, answer = WORDINGS[name]
    question = read_question(named_task(name), record, "f:1")
    correct_choice = question.choices[question.correct]
    assert (correct_choice.prompt, correct_choice.answer) == (prompt, answer)


def test_the_papers_templates_and_two_that_write_ship_by_name():
    assert set(TASKS) == {
        "sst2", "rte", "mrpc", "qqp", "qnli", "wnli", "boolq", "wsc", "wic", "multirc", "copa", "winogrande", "arc",
        "squad", "drop",
    }  # fmt: skip
    assert {name for name, task in TASKS.items() if task.compares_texts} == {"squad", "drop"}
    assert named_task("rte").fixed_answers == ("Yes", "No")


SPANS = ["Denver Broncos", "the Broncos"]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("squad", {"answers": {"text": SPANS, "answer_start": [177, 173]}}),  # as on the Hub
        ("squad", {"answers.text": SPANS}),  # as `Dataset.flatten` writes it
        ("drop", {"answers_spans": {"spans": SPANS, "types": ["span", "span"]}}),
    ],
)
def test_training_uses_the_first_of_several_right_answers(name, answers):
    record = {"title": "Super_Bowl_50", "context": "c", "passage": "c", "question": "Who won?", **answers}
    assert read_completion(named_task(name), record, "f:1").answer == " Denver Broncos"
    assert accepted_answers(named_task(name), record, "f:1") == (" Denver Broncos", " the Broncos")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answers": {"text": []}}, "train.jsonl:3: field 'answers.text' is an empty list"),
        ({"answers": {"text": ["a", 7]}}, "field 'answers.text' is a list with something other than texts"),
        ({"answers": {"text": ["a", " "]}}, "or with a blank one"),
        ({"answers": {"texts": ["a"]}}, "field 'answers.text' is missing"),
        ({"answers": ["a"]}, "field 'answers.text' is missing"),
        ({"answers.text": ["a"], "more": ["b"]}, "'answers.text' and 'more' are lists; one field"),
    ],
)
def test_an_invalid_answer_list_is_rejected_with_the_reason(record, message):
    task = Task(name="t", kind="completion", prompt="p", answer=" {answers.text} {more}")
    with pytest.raises(InvalidDataset, match=message):
        accepted_answers(task, {"more": "m", **record}, "train.jsonl:3")


def test_labels_may_be_numbers_or_booleans():
    task = named_task("boolq")
    for label, correct in ((True, 0), (False, 1), (1, 0), ("false", 1)):
        record = {"passage": "p", "question": "q", "label": label}
        assert read_question(task, record, "f:1").correct == correct


@pytest.mark.parametrize(
    ("label", "correct"),
    [
        *((1.0, 0), ("1.0", 0), (" 1 ", 0), ("0.00", 1), ("Not\tSO  good", 1), ("cafe\u0301", 0), ("A", 0), ("a", 1)),
        *(("maße", 0), ("masse", 1)),  # two words
    ],
)
def test_labels_that_differ_by_white_space_case_or_decimals_are_one(label, correct):
    answers = (
        {"text": " x", "labels": ["1", "café", "A", "Maße"]},
        {"text": " y", "labels": ["0", "not so good", "a", "Masse"]},
    )
    task = Task(name="t", prompt="{text}", answers=answers)
    assert read_question(task, {"text": "t", "label": label}, "f:1").correct == correct


def test_a_label_that_could_mean_two_answers_means_none():
    task = Task(name="t", prompt="{text}", answers=({"text": " x", "labels": ["A"]}, {"text": " y", "labels": ["a"]}))
    with pytest.raises(InvalidDataset, match="label 'a ' is not one of"):
        read_question(task, {"text": "t", "label": "a "}, "f:1")


def test_absent_fields_of_a_message_are_left_out():
    absent = {"name": None, "refusal": None, "tool_calls": [], "annotations": []}  # as OpenAI's clients write them
    record = {"messages": [{"role": "assistant", "content": "a", "weight": 1, **absent}]}
    messages = read_messages(Task(name="t", kind="messages"), record, "f:1")
    assert messages == [{"role": "assistant", "content": "a", "weight": 1}]


def test_a_whole_number_has_no_decimals_in_a_text():
    task = Task(name="t", kind="completion", prompt="{stars} of {most}:", answer="{text}")
    assert read_completion(task, {"stars": 4.0, "most": 4.5, "text": "t"}, "f:1").prompt == "4 of 4.5:"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"label": "positive"}, "reviews.jsonl:7: field 'text' is missing"),
        ({"text": "t"}, "reviews.jsonl:7: field 'label' is missing"),
        ({"text": None, "label": 1}, "reviews.jsonl:7: field 'text' is missing or null"),
        ({"text": "t", "label": None}, "reviews.jsonl:7: field 'label' is missing or null"),
        ({"text": {"a": "b"}, "label": 1}, "reviews.jsonl:7: field 'text' is an object; it must be a text"),
        ({"text": ["a"], "label": 1}, "reviews.jsonl:7: field 'text' is a list; it must be a text"),
        ({"text": " \n", "label": 1}, "reviews.jsonl:7: the text is blank"),
        ({"text": "t", "label": "meh"}, "reviews.jsonl:7: label 'meh' is not one of"),
    ],
)
def test_a_bad_record_is_named_with_its_line(record, message):
    with pytest.raises(InvalidDataset, match=message):
        read_question(named_task("sst2"), record, "reviews.jsonl:7")


@pytest.mark.parametrize("prompt", ["{text", "{}", "{0}", "{text!r}", "{text:>10}", "{text.__class__}", "{text[0]}"])
def test_templates_take_plain_fields_only(prompt):
    answers = (Answer(text=" a", labels=("0",)), Answer(text=" b", labels=("1",)))
    with pytest.raises(ValidationError, match="template"):
        Task(name="t", prompt=prompt, answers=answers)


def test_a_label_cannot_mean_two_answers():
    answers = (Answer(text=" a", labels=("0",)), Answer(text=" b", labels=("0",)))
    with pytest.raises(ValidationError, match="one answer only"):
        Task(name="t", prompt="{text}", answers=answers)


def test_doubled_braces_are_literal():
    answers = (Answer(text=" {{a}}", labels=("0",)), Answer(text=" b", labels=("1",)))
    task = Task(name="t", prompt="{{x}} {text}", answers=answers)
    question = read_question(task, {"text": "y", "label": 0}, "f:1")
    assert (question.choices[0].prompt, question.choices[0].answer) == ("{x} y", " {a}")
    assert task.fixed_answers == (" {a}", " b")


def test_an_unknown_task_name_lists_the_known_ones():
    with pytest.raises(InvalidTask, match="sst2"):
        named_task("sst-3")


PAIRS = Task(name="style", kind="preference")
LABELLED = Task(name="thumbs", kind="preference", answer="{completion}")


def test_a_preference_of_two_texts():
    preference = read_preference(PAIRS, {"prompt": "Hi", "chosen": " Hello.", "rejected": " What?"}, "f:1")
    assert [(choice.prompt, choice.answer) for choice in preference.answers] == [("Hi", " Hello."), ("Hi", " What?")]
    assert preference.liked
    assert (PAIRS.preference_loss, LABELLED.preference_loss, Task(name="t", kind="text").preference_loss) == (
        "dpo",
        "kto",
        None,
    )


@pytest.mark.parametrize(("label", "liked"), [(True, True), (False, False), (1, True), ("False", False), (0.0, False)])
def test_a_preference_with_a_label(label, liked):
    preference = read_preference(LABELLED, {"prompt": "Hi", "completion": " Hello.", "label": label}, "f:1")
    assert (len(preference.answers), preference.liked) == (1, liked)


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("implicit", [False, True])
def test_a_preference_of_conversations_as_trl_writes_them(implicit):
    prompt = [said("system", "Be kind."), said("user", "Hi")]
    chosen, rejected = [said("assistant", "Hello.")], [said("assistant", "What?")]
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if implicit:
        record = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    first, second = read_preference(PAIRS, record, "f:1").answers
    assert [message.get("weight") for message in first] == [0, 0, None]
    assert [message["content"] for message in second] == ["Be kind.", "Hi", "What?"]


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        (PAIRS, {"rejected": " Hello."}, "are equal"),
        (PAIRS, {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "a")]}, "are equal"),
        (PAIRS, {"chosen": [said("assistant", "a")]}, "both be texts or both be lists"),
        (PAIRS, {"chosen": [said("assistant", "a")], "rejected": [said("user", "b")]}, "no turn of the assistant"),
        (PAIRS, {"rejected": None}, "'rejected' is missing"),
        (PAIRS, {"rejected": "  "}, "an answer is blank"),
        (LABELLED, {"label": "maybe"}, "'label' must be true or false"),
        (LABELLED, {"label": None}, "'label' must be true or false"),
    ],
)
def test_preferences_that_cannot_be_learned(task, change, message):
    record = {"prompt": "Hi", "chosen": " Hello.", "rejected": " What?", "completion": " Hello.", "label": True}
    with pytest.raises(InvalidDataset, match=message) as error:
        read_preference(task, record | change, "f:1")
    assert "Hello" not in error.value.detail


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "completion", "prompt": "{a}", "answer": "{b}", "rejected": "{c}"}, "has no rejected"),
        ({"kind": "preference", "metric": "loss"}, "preference_accuracy"),
        ({"kind": "preference", "mapped": {"a": {"field": "b", "values": {"1": "x"}}}}, "no mapped fields"),
        ({"kind": "preference", "truncate": "tail"}, "no prompt to truncate"),
    ],
)
def test_invalid_tasks_of_preferences(settings, message):
    with pytest.raises(ValidationError, match=message):
        Task(name="t", **settings)


def test_losses_and_tasks_that_do_not_fit():
    assert PAIRS.loss_fault("dpo") is None
    assert "needs loss 'dpo', not 'full'" in PAIRS.loss_fault("full")
    assert "records with labels and needs loss 'kto'" in LABELLED.loss_fault("dpo")
    assert "loss 'dpo' needs a task of kind preference" in named_task("sst2").loss_fault("dpo")
    assert named_task("sst2").loss_fault("candidates") is None
