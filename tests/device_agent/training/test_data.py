"""Splits of a data set, and what their errors may say to whom."""

import json

import pytest

from device_agent.training.data import check_directory, read_splits
from device_agent.training.messages import describe
from device_agent.training.result import rounded_down
from shared.errors import InvalidDataset, InvalidTask
from shared.job import TrainingSettings
from shared.task import Answer, Task
from tests.device_agent.conftest import TASK, write_records


@pytest.fixture
def read(rademacher):
    def read(directory, task=TASK, **settings):
        recipe = rademacher.manifest.recipe
        return read_splits(directory, task, rademacher.tokenizer, recipe, TrainingSettings(**settings))

    return read


def texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_all_three_files(read, dataset):
    splits = read(dataset)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [13, 9, 7]


def test_a_fifth_of_train_is_held_out_without_a_validation_file(read, dataset):
    (dataset / "validation.jsonl").unlink()
    splits = read(dataset)
    assert (len(splits.train), len(splits.validation)) == (11, 2)
    everything = [*splits.train, *splits.validation]
    (dataset / "validation.jsonl").write_bytes((dataset / "test.jsonl").read_bytes())
    whole = read(dataset).train
    assert all(example in whole for example in everything)
    assert all(example in everything for example in whole)


def test_the_held_out_part_is_the_same_for_every_job(read, dataset):
    (dataset / "validation.jsonl").unlink()
    assert read(dataset, seed=1).validation == read(dataset, seed=2).validation


def test_one_record_cannot_be_split(read, tmp_path):
    write_records(tmp_path / "train.jsonl", 1, 0)
    with pytest.raises(InvalidDataset, match="cannot both train and validate"):
        read(tmp_path)


def test_test_is_optional(read, dataset):
    (dataset / "test.jsonl").unlink()
    assert read(dataset).test is None


def test_limits_sample_over_the_whole_file(read, dataset):
    write_records(dataset / "test.jsonl", 100, 9)
    whole, limited = read(dataset).test, read(dataset, test_limit=10, validation_limit=3)
    assert (len(limited.test), len(limited.validation)) == (10, 3)
    places = [whole.index(example) for example in limited.test]
    assert max(places) > 50
    assert limited.test == read(dataset, test_limit=10, seed=5).test


def test_truncated_examples_are_counted(read, dataset):
    record = {"text": "word " * 50, "label": "positive"}
    with (dataset / "train.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert read(dataset).counts.truncated == 1


def with_line(dataset, split, line):
    with (dataset / f"{split}.jsonl").open("a") as file:
        file.write(line + "\n")


BAD_LINES = {
    "{not json SECRET": "the line is not JSON",
    '["SECRET"]': "must be a JSON object",
    '{"label": "positive", "other": "SECRET"}': "field 'text' is missing",
    '{"text": "SECRET"}': "field 'label' is missing",
    '{"text": "SECRET", "label": "SECRET"}': "SECRET",
}


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("line", BAD_LINES)
def test_a_record_that_does_not_fit_is_left_out_and_named_to_the_owner_alone(read, dataset, split, line):
    before = read(dataset)
    count = len((dataset / f"{split}.jsonl").read_text().splitlines())
    with_line(dataset, split, line)
    splits = read(dataset)
    assert (splits.train, splits.validation, splits.test) == (before.train, before.validation, before.test)
    assert splits.unusable == (split == "train")
    summary, reason = splits.reasons
    assert summary.startswith("1 records of the data set do not fit task 'sst2'")
    assert f"{dataset / split}.jsonl:{count + 1}" in reason
    assert BAD_LINES[line] in reason


def test_a_record_decides_about_itself_alone(read, dataset):
    """With a held-out part, too: whether one record fits moves no other record from one split to the other."""
    (dataset / "validation.jsonl").unlink()
    lines = (dataset / "train.jsonl").read_text().splitlines()
    before = read(dataset)
    (dataset / "train.jsonl").write_text("\n".join(["{", *lines[1:]]))
    after = read(dataset)
    assert len(after.train) + len(after.validation) == 12
    assert all(example in before.train for example in after.train)
    assert all(example in before.validation for example in after.validation)


@pytest.mark.parametrize("content", [b"\n\n", b"\xff\xfe\x00"])
def test_a_file_without_usable_records(read, dataset, content):
    (dataset / "train.jsonl").write_bytes(content)
    with pytest.raises(InvalidDataset, match=r"0 of \d train records fit") as caught:
        read(dataset)
    assert str(dataset) not in describe(caught.value).error.detail


def test_half_of_a_split_must_fit(read, dataset):
    lines = (dataset / "test.jsonl").read_text().splitlines()
    (dataset / "test.jsonl").write_text("\n".join([*lines[:5], "{", "{", "{", "{", "{"]))
    assert len(read(dataset).test) == 5
    with_line(dataset, "test", "\n{")
    with pytest.raises(InvalidDataset, match="5 of 11 test records fit"):
        read(dataset)


def test_a_task_that_no_recipe_of_this_form_can_take(read, dataset, rademacher):
    task = Task(name="custom", prompt="{text}", answers=[Answer(text=f" {n}", labels=(str(n),)) for n in range(3)])
    with pytest.raises(InvalidTask, match="3 answers, but the recipe's choices is 2"):
        read(dataset, task)


def test_directories(tmp_path):
    with pytest.raises(InvalidDataset, match="is no directory"):
        check_directory(tmp_path / "nowhere")
    with pytest.raises(InvalidDataset, match=r"has no train\.jsonl"):
        check_directory(tmp_path)


@pytest.mark.parametrize(
    ("count", "records", "told"),
    [(0, 1000, 0), (9, 10, 0), (10, 1000, 10), (99, 1000, 10), (100, 1000, 100), (499, 1000, 100), (1000, 1000, 500)],
)
def test_counts_of_records_are_told_by_shares(count, records, told):
    assert rounded_down(count, records) == told
