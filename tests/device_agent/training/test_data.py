"""Splits of a data set, and what their errors may say to whom."""

import pytest

from device_agent.jobs.leased_job import public_error
from device_agent.training.result import rounded_down
from shared.errors import InvalidDataset
from shared.training_settings import TrainingSettings
from tests.device_agent.tiny import write_records


@pytest.fixture
def read(rademacher):
    return lambda directory, **settings: rademacher.splits(directory, TrainingSettings(**settings))


def test_a_fifth_of_train_is_held_out_without_a_validation_file(read, dataset):
    (dataset / "validation.jsonl").unlink()
    splits = read(dataset, seed=1)
    assert (len(splits.train), len(splits.validation)) == (11, 2)
    assert splits.validation == read(dataset, seed=2).validation  # the same for every job
    everything = [*splits.train, *splits.validation]
    (dataset / "validation.jsonl").write_bytes((dataset / "test.jsonl").read_bytes())
    whole = read(dataset).train
    assert all(example in whole for example in everything)
    assert all(example in everything for example in whole)


def test_one_record_cannot_be_split(read, tmp_path):
    write_records(tmp_path / "train.jsonl", 1, 0)
    with pytest.raises(InvalidDataset, match="cannot both train and validate"):
        read(tmp_path)


def test_limits_sample_over_the_whole_file(read, dataset):
    write_records(dataset / "test.jsonl", 100, 9)
    whole, sample = read(dataset).test, read(dataset, test_limit=10, validation_limit=3)
    assert (len(sample.test), len(sample.validation)) == (10, 3)
    places = [whole.index(example) for example in sample.test]
    assert max(places) > 50
    assert sample.test == read(dataset, test_limit=10, seed=5).test


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


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_file_has_records_and_half_of_a_large_one_fits(read, dataset, split):
    (dataset / f"{split}.jsonl").write_bytes(b"\n\n")
    with pytest.raises(InvalidDataset, match="the file contains no records") as error:
        read(dataset)
    assert str(dataset) not in public_error(error.value).detail
    (dataset / f"{split}.jsonl").write_text("{\n" * 600)
    with pytest.raises(InvalidDataset, match=f"{split}.jsonl: 0 of 600 records fit task 'sst2'; at least 50% must"):
        read(dataset)


def test_without_a_usable_record_nothing_is_trained_and_nothing_is_right(read, dataset, rademacher):
    for split in ("train", "validation", "test"):
        (dataset / f"{split}.jsonl").write_bytes(b"\xff\xfe\x00\n{")
    splits = read(dataset)
    assert (len(splits.train), len(splits.validation), splits.test) == (1, 1, None)
    (blank,) = splits.validation
    assert blank.rows[0] == blank.rows[blank.correct]
    assert blank.correct != 0  # the first of equal candidates is predicted
    plan = rademacher.plan(dataset, steps=5).model_copy(update={"blank": splits.blank})
    assert {plan.lr_at(step) for step in range(5)} == {0}


def test_whether_a_job_fails_is_noised_and_does_not_follow_the_recipe_s_lengths(read, dataset, rademacher):
    """At the edge, where one record would decide, the device's secret decides; answers do not change with repetition
    or with another answer_length, for which no record fits.
    """
    lines = (dataset / "train.jsonl").read_text().splitlines()[:1] * 50
    recipe = rademacher.manifest.recipe

    def fails(key, fit, answer_length=6):
        (dataset / "train.jsonl").write_text("\n".join([*lines[:fit], *["{"] * (300 - fit)]))
        small = recipe.model_copy(update={"answer_length": answer_length})
        try:
            rademacher.splits(dataset, TrainingSettings(), recipe=small, noise_key=key)
        except InvalidDataset:
            return True
        return False

    keys = [bytes([device]).hex() for device in range(24)]
    for fit in (49, 50):
        failed = [fails(key, fit) for key in keys]
        assert 4 < sum(failed) < 20
        assert failed == [fails(key, fit, answer_length=1) for key in keys]
    assert failed[:4] == [fails(key, 50) for key in keys[:4]]


@pytest.mark.parametrize(
    ("count", "records", "expected"),
    [(0, 9000, 0), (9, 10, 0), (99, 99, 0), (100, 9000, 90), (900, 9000, 900), (4499, 9000, 900), (9000, 9000, 4500)],
)
def test_counts_of_records_are_told_by_shares(count, records, expected):
    assert rounded_down(count, records) == expected
