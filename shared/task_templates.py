"""The paper's thirteen prompt templates (Table 6, "The prompt template of the datasets"), by name.

The wording is the table's. docs/paper.md lists the decisions about line breaks and answer forms. Field names are those
of the GLUE and SuperGLUE files except for `sst2` (`text`; GLUE has `sentence`), `winogrande` (the sentence split at its
blank: `context`, `option1`, `option2`, `object`) and `arc` (`op1` to `op4`, `label`).

`squad` and `drop` are MeZO's templates of both data sets, whose answers are written; the paper has SQuAD in a figure
and no template for it. Field names are those of both data sets on the Hub, whose answers are lists: of `answers` the
`text`, and of `answers_spans` the `spans`.
"""

from __future__ import annotations

from shared.errors import InvalidTask
from shared.task import Answer, MappedField, Task


def _yes_no_task(name: str, prompt: str, yes_labels: tuple[str, ...], no_labels: tuple[str, ...]) -> Task:
    # The prompt ends with a line break, so the answer has no leading space.
    answers = (Answer(text="Yes", labels=yes_labels), Answer(text="No", labels=no_labels))
    return Task(name=name, prompt=prompt, answers=answers)


_TRUE, _FALSE = ("1", "true", "True"), ("0", "false", "False")

_ALL = (
    Task(
        name="sst2",
        prompt="{text} It was",
        answers=(
            Answer(text=" terrible", labels=("negative", "0")),
            Answer(text=" great", labels=("positive", "1")),
        ),
    ),
    _yes_no_task(
        "rte",
        '{premise} Does this mean that "{hypothesis}" is true? Yes or No?\n',
        ("entailment", "0"),
        ("not_entailment", "1"),
    ),
    _yes_no_task(
        "mrpc",
        "Do the following two sentences mean the same thing? Yes or No?\n"
        "Sentence 1: {sentence1}\nSentence 2: {sentence2}\n",
        ("equivalent", "1"),
        ("not_equivalent", "0"),
    ),
    _yes_no_task(
        "qqp",
        "Are these two questions asking the same thing? Yes or No?\nQuestion 1: {question1}\nQuestion 2: {question2}\n",
        ("duplicate", "1"),
        ("not_duplicate", "0"),
    ),
    _yes_no_task(
        "qnli",
        "Does this sentence answer the question? Yes or No?\nSentence 1: {question}\nSentence 2: {sentence}\n",
        ("entailment", "0"),
        ("not_entailment", "1"),
    ),
    _yes_no_task(
        "wnli",
        "Given the first sentence, is the second sentence true? Yes or No?\n"
        "Sentence 1: {sentence1}\nSentence 2: {sentence2}\n",
        ("entailment", "1"),
        ("not_entailment", "0"),
    ),
    _yes_no_task("boolq", "{passage} {question}?\n", _TRUE, _FALSE),
    _yes_no_task(
        "wsc",
        '{text} In the previous sentence, does the pronoun "{span2_text}" refer to {span1_text}?\n',
        _TRUE,
        _FALSE,
    ),
    _yes_no_task(
        "wic",
        'Does the word "{word}" have the same meaning in these two sentences? Yes, No?\n{sentence1}\n{sentence2}\n',
        _TRUE,
        _FALSE,
    ),
    _yes_no_task(
        "multirc",
        '{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n',
        _TRUE,
        _FALSE,
    ),
    Task(
        name="copa",
        prompt="{premise} {connective}",
        answers=(Answer(text=" {choice1}", labels=("0",)), Answer(text=" {choice2}", labels=("1",))),
        mapped={"connective": MappedField(field="question", values={"effect": "so", "cause": "because"})},
    ),
    Task(
        name="winogrande",
        prompt="{context}",
        answers=(
            Answer(prompt="{context} {option1}", text=" {object}", labels=("1",)),
            Answer(prompt="{context} {option2}", text=" {object}", labels=("2",)),
        ),
        label_field="answer",
    ),
    Task(
        name="arc",
        prompt="Pick the most correct option to answer the following question: {question}\n"
        "Options: {op1}, {op2}, {op3}, {op4}\nAnswer:",
        answers=tuple(Answer(text=f" {{op{n}}}", labels=(str(n), "ABCD"[n - 1])) for n in (1, 2, 3, 4)),
    ),
    Task(
        name="squad",
        kind="completion",
        prompt="Title: {title}\nContext: {context}\nQuestion: {question}\nAnswer:",
        answer=" {answers.text}",
        metric="token_f1",
    ),
    Task(
        name="drop",
        kind="completion",
        prompt="Passage: {passage}\nQuestion: {question}\nAnswer:",
        answer=" {answers_spans.spans}",
        metric="token_f1",
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def named_task(name: str) -> Task:
    """Returns a built-in task. Raises InvalidTask, with the list of names, for an unknown name."""
    if name not in TASKS:
        raise InvalidTask(f"there is no built-in task {name!r}; use one of {', '.join(TASKS)}, or send a complete task")
    return TASKS[name]
