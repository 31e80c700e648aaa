"""Splits of a data set, and what their errors may say to whom."""

import json

import pytest

from device_agent.errors import UnusableRecord
from device_agent.training.data import check_directory, read_splits
from device_agent.training.messages import describe
from shared.errors import InvalidDataset
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
    with pytest.raises(UnusableRecord, match="cannot both train and validate"):
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
    assert read(dataset).truncated == 1


def with_line(dataset, split, line):
    with (dataset / f"{split}.jsonl").open("a") as file:
        file.write(line + "\n")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    ("line", "here", "told"),
    [
        ("{not json SECRET", "not JSON", "the device's own log says why"),
        ('["SECRET"]', "must be a JSON object", "the device's own log says why"),
        ('{"label": "positive", "other": "SECRET"}', "field 'text' is missing", "field 'text' is missing"),
        ('{"text": "SECRET"}', "field 'label' is missing", "field 'label' is missing"),
        ('{"text": "SECRET", "label": "SECRET"}', "SECRET", "the device's own log says why"),
    ],
)
def test_a_bad_line_is_named_and_never_quoted_to_the_server(read, dataset, split, line, here, told):
    count = len((dataset / f"{split}.jsonl").read_text().splitlines())
    with_line(dataset, split, line)
    with pytest.raises(UnusableRecord) as caught:
        read(dataset)
    assert f"{dataset / split}.jsonl:{count + 1}" in caught.value.detail
    assert here in caught.value.detail
    public = describe(caught.value).error.detail
    assert f"{split}.jsonl, line {count + 1} cannot" in public
    assert told in public
    assert "SECRET" not in public
    assert str(dataset) not in public


def test_an_empty_file_and_bytes_that_are_no_text(read, dataset):
    (dataset / "train.jsonl").write_text("\n\n")
    with pytest.raises(UnusableRecord, match="contains no records"):
        read(dataset)
    (dataset / "train.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnusableRecord, match="cannot be read"):
        read(dataset)


def test_a_template_whose_field_is_missing(read, dataset):
    task = Task(
        name="custom",
        prompt="{title}: {text} It was",
        answers=(
            Answer(text=" terrible", labels=("negative",)),
            Answer(text=" great", labels=("positive",)),
        ),
    )
    with pytest.raises(UnusableRecord, match=r"train\.jsonl:1: field 'title' is missing") as caught:
        read(dataset, task)
    assert "field 'title' is missing" in caught.value.public


def test_directories(tmp_path):
    with pytest.raises(InvalidDataset, match="is no directory"):
        check_directory(tmp_path / "nowhere")
    with pytest.raises(InvalidDataset, match=r"has no train\.jsonl"):
        check_directory(tmp_path)
