"""Every public file format, from files written here as their authors write them, through its template."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.accuracy.glue import FORMATS, read_task, read_tsv
from shared.errors import InvalidDataset
from shared.task import Question, read_question
from shared.task_templates import named_task

MULTIRC = {
    "idx": 0,
    "version": 1.1,
    "passage": {
        "text": "Ann has a cat.",
        "questions": [
            {
                "question": "Who has a cat?",
                "idx": 0,
                "answers": [{"text": "Ann", "idx": 0, "label": 1}, {"text": "Bob", "idx": 1, "label": 0}],
            }
        ],
    },
}
ARC = {
    "id": "X_1",
    "question": {
        "stem": "Which is warm?",
        "choices": [
            {"text": word, "label": label} for word, label in zip(("ice", "fire", "snow", "rain"), "ABCD", strict=True)
        ],
    },
    "answerKey": "B",
}
# folder, training file, its text, the first question's prompt, its candidates, the right one
CASES: dict[str, tuple[str, str, str, str, tuple[str, ...], int]] = {
    "sst2": (
        "SST-2",
        "train.tsv",
        'sentence\tlabel\na "fine film \t1\n',
        'a "fine film  It was',
        (" terrible", " great"),
        1,
    ),
    "rte": (
        "RTE",
        "train.tsv",
        "index\tsentence1\tsentence2\tlabel\n0\tIt rains.\tIt is wet.\tnot_entailment\n",
        'It rains. Does this mean that "It is wet." is true? Yes or No?\n',
        ("Yes", "No"),
        1,
    ),
    "mrpc": (
        "MRPC",
        "train.tsv",
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t70\t71\tHe left .\tHe went .\r\n",
        "Do the following two sentences mean the same thing? Yes or No?\nSentence 1: He left .\n"
        "Sentence 2: He went .\n",
        ("Yes", "No"),
        0,
    ),
    "qqp": (
        "QQP",
        "train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow?\t0\n",
        "Are these two questions asking the same thing? Yes or No?\nQuestion 1: Why?\nQuestion 2: How?\n",
        ("Yes", "No"),
        1,
    ),
    "qnli": (
        "QNLI",
        "train.tsv",
        "index\tquestion\tsentence\tlabel\n0\tWhen?\tIn May.\tentailment\n",
        "Does this sentence answer the question? Yes or No?\nSentence 1: When?\nSentence 2: In May.\n",
        ("Yes", "No"),
        0,
    ),
    "wnli": (
        "WNLI",
        "train.tsv",
        "index\tsentence1\tsentence2\tlabel\n0\tIt fell.\tThe cup fell.\t1\n",
        "Given the first sentence, is the second sentence true? Yes or No?\nSentence 1: It fell.\n"
        "Sentence 2: The cup fell.\n",
        ("Yes", "No"),
        0,
    ),
    "boolq": (
        "BoolQ",
        "train.jsonl",
        json.dumps({"question": "is it wet", "passage": "It rains.", "idx": 0, "label": True}),
        "It rains. is it wet?\n",
        ("Yes", "No"),
        0,
    ),
    "wsc": (
        "WSC",
        "train.jsonl",
        json.dumps(
            {
                "text": "Ann saw that she won.",
                "target": {"span1_index": 0, "span2_index": 3, "span1_text": "Ann", "span2_text": "she"},
                "idx": 0,
                "label": False,
            }
        ),
        'Ann saw that she won. In the previous sentence, does the pronoun "she" refer to Ann?\n',
        ("Yes", "No"),
        1,
    ),
    "wic": (
        "WiC",
        "train.jsonl",
        json.dumps(
            {
                "word": "place",
                "sentence1": "A nice place.",
                "sentence2": "Place it there.",
                "idx": 0,
                "label": False,
                "start1": 7,
                "start2": 0,
                "end1": 12,
                "end2": 5,
                "version": 1.1,
            }
        ),
        'Does the word "place" have the same meaning in these two sentences? Yes, No?\n'
        "A nice place.\nPlace it there.\n",
        ("Yes", "No"),
        1,
    ),
    "multirc": (
        "MultiRC",
        "train.jsonl",
        json.dumps(MULTIRC),
        'Ann has a cat.\nQuestion: Who has a cat?\nI found this answer "Ann". Is that correct? Yes or No?\n',
        ("Yes", "No"),
        0,
    ),
    "copa": (
        "COPA",
        "train.jsonl",
        json.dumps(
            {"premise": "It rained.", "choice1": "I sang.", "choice2": "I got wet.", "question": "effect", "label": 1}
        ),
        "It rained. so",
        (" I sang.", " I got wet."),
        1,
    ),
    "winogrande": (
        "winogrande_1.1",
        "train_xl.jsonl",
        json.dumps(
            {"qID": "q", "sentence": "Ann met Eve and _ smiled.", "option1": "Ann", "option2": "Eve", "answer": "2"}
        ),
        "Ann met Eve and Ann",
        (" smiled.", " smiled."),
        1,
    ),
    "arc-easy": (
        "ARC-Easy",
        "ARC-Easy-Train.jsonl",
        json.dumps(ARC),
        "Pick the most correct option to answer the following question: Which is warm?\n"
        "Options: ice, fire, snow, rain\nAnswer:",
        (" ice", " fire", " snow", " rain"),
        1,
    ),
}
CASES["arc-challenge"] = ("ARC-Challenge", "ARC-Challenge-Train.jsonl", *CASES["arc-easy"][2:])


def write(directory: Path, name: str, text: str) -> None:
    """The training file, and the file that is tested on, which has the same records."""
    folder, train = CASES[name][:2]
    (directory / folder).mkdir(parents=True, exist_ok=True)
    for file in (train, next(file for file in FORMATS[name].test if Path(file).suffix == Path(train).suffix)):
        (directory / folder / file).write_bytes(text.encode())


def first(task: str, located: tuple[str, dict[str, Any]]) -> Question:
    where, record = located
    return read_question(named_task(task), record, where)


@pytest.mark.parametrize("name", FORMATS)
def test_a_files_first_record_fills_the_papers_template(tmp_path: Path, name: str) -> None:
    folder, _, text, prompt, answers, correct = CASES[name]
    write(tmp_path, name, text)
    for directory in (tmp_path, tmp_path / folder):
        found = read_task(name, directory)
        for records in (found.train, found.test):
            question = first(found.task, records[0])
            assert question.choices[0].prompt == prompt
            assert tuple(choice.answer for choice in question.choices) == answers
            assert question.correct == correct
        assert found.left_out == 0


def test_superglues_rte_is_read_too(tmp_path: Path) -> None:
    line = json.dumps({"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment", "idx": 0})
    for file in ("train.jsonl", "val.jsonl"):
        (tmp_path / file).write_text(line + "\n")
    question = first("rte", read_task("rte", tmp_path).train[0])
    assert question.choices[0].prompt == CASES["rte"][3]
    assert question.correct == 0


def test_multirc_has_a_record_for_each_answer(tmp_path: Path) -> None:
    write(tmp_path, "multirc", json.dumps(MULTIRC))
    assert [record["answer"] for _, record in read_task("multirc", tmp_path).train] == ["Ann", "Bob"]


def test_winograndes_second_candidate_has_its_own_prompt(tmp_path: Path) -> None:
    write(tmp_path, "winogrande", CASES["winogrande"][2])
    assert first("winogrande", read_task("winogrande", tmp_path).train[0]).choices[1].prompt == "Ann met Eve and Eve"


def test_a_question_of_three_options_is_left_out_and_counted(tmp_path: Path) -> None:
    short = {**ARC, "question": {"stem": "Which?", "choices": ARC["question"]["choices"][:3]}}  # type: ignore[index]
    write(tmp_path, "arc-easy", "\n".join(map(json.dumps, (ARC, short))))
    found = read_task("arc-easy", tmp_path)
    assert (len(found.train), len(found.test), found.left_out) == (1, 1, 2)


def test_a_damaged_row_in_hundreds_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\n" + "good\t1\n" * 199 + "torn\n" + "bad\t0\n")
    records, broken = read_tsv(path, {"text": "sentence", "label": "label"})
    assert broken == 1
    assert len(records) == 200
    assert records[-1] == (f"{path}:202", {"text": "bad", "label": "0"})


def test_many_damaged_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\ngood\t1\ntorn\n")
    with pytest.raises(InvalidDataset, match="1 of 2 rows"):
        read_tsv(path, {"text": "sentence", "label": "label"})


def test_another_columns_name_is_named(tmp_path: Path) -> None:
    write(tmp_path, "sst2", "text\tlabel\ngood\t1\n")
    with pytest.raises(InvalidDataset, match="no column 'sentence'; its columns are text, label"):
        read_task("sst2", tmp_path)


@pytest.mark.parametrize("line", [{"passage": "It rains.", "label": True}, {"passage": 3}])
def test_another_field_is_named_with_its_line(tmp_path: Path, line: dict[str, Any]) -> None:
    write(tmp_path, "boolq", json.dumps(line))
    with pytest.raises(InvalidDataset, match=r"train.jsonl:1: not in .*'question'"):
        read_task("boolq", tmp_path)


def test_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match=r"no data of 'copa': looked for train.jsonl there and in COPA"):
        read_task("copa", tmp_path)


def test_an_unknown_name_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match="arc-challenge"):
        read_task("squad", tmp_path)
