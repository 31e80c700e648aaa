"""Runs that continue an adapter draw from records of earlier runs: which ones, how often, and with the same bytes."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.datasets.store import AvailableDatasets, DatasetStore, HeldDataset
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.rehearsal import TrainingHistory, count_new_records, prepare_rehearsal
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from device_agent.training.batch_sampler import BatchSampler
from shared.canonical import file_sha256
from shared.job import TOO_FEW_NEW_RECORDS, Repeat
from shared.privacy import ExamplePrivacy
from shared.training_settings import TrainingSettings
from tests.device_agent.tiny import TASK, write_dataset, write_records
from tests.device_agent.training.runs import begun, hashes, ledger, train, train_until
from tests.device_agent.warm_starts import vouched

OWN = {"train": 10, "validation": 6, "test": 5}


@given(
    seed=st.integers(0, 1000),
    new=st.integers(1, 30),
    rehearsed=st.integers(1, 30),
    batch=st.integers(1, 9),
    share=st.sampled_from((0.0, 0.1, 0.3, 0.5, 0.9)),
)
def test_a_share_of_all_visits_is_rehearsed_and_each_part_is_visited_evenly(seed, new, rehearsed, batch, share):
    answers = tuple(index % 2 if index < 30 < new + rehearsed else 0 for index in range(new + rehearsed))
    lengths = tuple(index * 7 % 12 for index in range(new + rehearsed))
    sampler = BatchSampler(seed, answers, lengths, batch, rehearsed, share)
    visits = [index for step in range(60) for index in sampler.indices(step)]
    again = [index for index in visits if index >= new]
    assert len(again) == int(60 * batch * share)
    for part, size in ((again, rehearsed), ([index for index in visits if index < new], new)):
        counts = Counter(part)
        assert set(counts) <= set(range(new + rehearsed))
        if part:
            assert max(counts.values()) - min(counts[index] for index in counts) <= 1
            assert len(counts) == min(size, len(part))
    assert sampler.indices(7) == visits[7 * batch : 8 * batch]


@pytest.fixture
def history(tmp_path):
    return TrainingHistory(tmp_path / "trained")


@pytest.fixture
def others(tmp_path):
    """Data sets `products` and `songs` beside the run's own, `movies`."""
    directories = {name: write_dataset(tmp_path / name) for name in ("products", "songs")}
    return AvailableDatasets(DatasetStore(tmp_path / "data"), directories)


def prepare(run, history, dataset, others, may_read=lambda _: True):
    return prepare_rehearsal(
        run, history.behind("2" * 64), TASK, HeldDataset("movies", dataset, dataset), others, may_read
    )


def test_what_was_trained_is_known_by_its_hash_while_it_only_grows(run, history, dataset, others, tmp_path):
    history.record("1" * 64, None, "products", TASK, others.directories()["products"])
    history.record("2" * 64, "1" * 64, "movies", TASK, dataset)
    copied = sorted((others.directories()["products"] / "train.jsonl").read_bytes().splitlines())
    for name in ("train.jsonl", "test.jsonl"):
        with (dataset / name).open("a") as file:
            file.write('{"text": "new", "label": "positive"}\n')
    with (others.directories()["products"] / "train.jsonl").open("a") as file:
        file.write('{"text": "not trained", "label": "positive"}\n')
    assert prepare(run, history, dataset, others) == {"train": 13, "validation": 9, "test": 7}
    assert sorted(run.rehearsed.read_bytes().splitlines()) == copied
    assert len(run.held_out.read_bytes().splitlines()) == 7
    prepare(run, history, dataset, others, lambda held: held.name != "products")
    assert run.rehearsed.read_bytes() == b""
    write_records(dataset / "train.jsonl", 20, 8)
    write_records(others.directories()["products"] / "train.jsonl", 20, 8)
    (others.directories()["products"] / "test.jsonl").unlink()
    assert prepare(run, history, dataset, others) == {"train": 0, "validation": 9, "test": 7}
    assert run.rehearsed.read_bytes() == b""
    assert history.behind("3" * 64) == ()
    assert count_new_records(history.behind("2" * 64), HeldDataset("movies", dataset, dataset)) == 20 + 0 + 1
    assert count_new_records((), HeldDataset("movies", dataset, dataset)) == 20 + 9 + 8
    kinds = [path.name for path in (tmp_path / "trained").iterdir()]
    assert sorted(kinds) == [f"{number * 64}.json" for number in "12"]
    assert b"film" not in (tmp_path / "trained" / kinds[0]).read_bytes()


def test_new_examples_come_before_those_of_earlier_runs(rademacher, dataset, run):
    def splits_of(own, **settings):
        return rademacher.splits(dataset, TrainingSettings(**settings), earlier=own, run=run)

    def counts(splits):
        return splits.records, splits.truncated, splits.unusable

    plain = rademacher.splits(dataset, TrainingSettings())
    splits = splits_of(OWN)
    assert (splits.train, splits.rehearsed) == ([*plain.train[10:], *plain.train[:10]], 10)
    assert splits.earlier == plain.test[:5]
    assert (splits.validation, splits.test) == (plain.validation, plain.test)
    assert counts(splits) == counts(plain)
    run.path.mkdir()
    write_records(run.rehearsed, 4, 5)
    write_records(run.held_out, 3, 6)
    both = splits_of(OWN)
    assert (len(both.train), both.rehearsed, len(both.earlier)) == (17, 14, 8)
    assert counts(both) == counts(plain)
    assert len(splits_of(OWN, validation_limit=2).earlier) == 2
    for path in (run.rehearsed, run.held_out):
        path.unlink()
    for own in ({}, {"train": 13, "validation": 9, "test": 7}):  # nothing is earlier, or nothing is new
        unchanged = splits_of(own)
        assert (unchanged.train, unchanged.rehearsed, unchanged.earlier) == (plain.train, 0, None)


def test_a_run_that_rehearses_resumes_to_the_same_bytes_and_measures_earlier_records(
    rademacher, dataset, launcher, tmp_path
):
    plan = rademacher.plan(dataset, steps=20, lr=0.3, seed=3, evaluation_interval=12)
    plain = begun(tmp_path / "plain", plan)
    whole, run = (begun(tmp_path / name, plan.model_copy(update={"earlier": OWN})) for name in ("whole", "run"))
    for each in (whole, run):
        write_records(each.rehearsed, 4, 5)
    result = train(whole, launcher)
    for step in (3, 13):
        train_until(run, launcher, step)
    train(run, launcher)
    train(plain, launcher)
    assert hashes(run) == hashes(whole) != hashes(plain)
    measured = [evaluation for evaluation in ledger(whole).evaluations if evaluation.split == "earlier"]
    assert [(each.step, each.adapter, each.total) for each in measured] == [
        (0, "current", 5),
        (result.best_step, "best", 5),
    ]
    assert (result.earlier_accuracy_before, result.earlier_accuracy_after) == tuple(each.accuracy for each in measured)
    assert not whole.rehearsed.exists()


def first_version(daemon, best, program, server_key):
    """Trains the first job; returns the version that the server makes of its B."""
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    signed, _ = vouched(program, server_key, sha256=file_sha256(best), size=best.stat().st_size)
    return signed, best.read_bytes()


def test_a_job_that_continues_rehearses_what_the_owner_still_lets_it_read(
    make, enrolled, server, server_key, rademacher, dataset, tmp_path
):
    products = write_dataset(tmp_path / "products")
    daemon = make(enrolled, {"movies": dataset, "products": products})
    training = {"steps": 4, "evaluation_interval": 2}
    server.add_job(rademacher, **training)
    start = first_version(daemon, enrolled.run("job-1").best, rademacher, server_key)
    for number, settings, rehearsed in ((2, {}, 7), (3, {"rehearsal": 0.0}, None), (4, {}, None)):
        if number == 4:
            TaskApprovals(enrolled.tasks).decide(TASK, ["movies"], TaskState.REVOKED)
        server.add_job(rademacher, "products", f"job-{number}", start=start, **training | settings)
        assert daemon.run(once=True).outcome is Outcome.COMPLETED
        totals = [each.total for each in server.completions[-1].result.evaluations if each.split == "earlier"]
        assert totals == ([] if rehearsed is None else [rehearsed] * 2)
    texts = {json.loads(line)["text"] for line in (dataset / "train.jsonl").read_text().splitlines()}
    assert not any(text.encode() in server.received_bytes for text in texts)
    history = TrainingHistory(enrolled.trained).behind(file_sha256(enrolled.run("job-2").best))
    assert [each.dataset for each in history] == ["movies", "products"]


def test_a_job_that_repeats_is_trained_once_enough_records_are_new(
    daemon, enrolled, server, server_key, rademacher, dataset
):
    training = {"steps": 2, "repeat": Repeat(every="7d", min_new_records=3)}
    server.add_job(rademacher, **training)
    start = first_version(daemon, enrolled.run("job-1").best, rademacher, server_key)
    for number, outcome in ((2, Outcome.FAILED), (3, Outcome.COMPLETED)):
        with (dataset / "train.jsonl").open("a") as file:
            file.write(f'{{"text": "warm {number}", "label": "positive"}}\n' * 2)
        server.add_job(rademacher, job_id=f"job-{number}", start=start, **training)
        assert daemon.run(once=True).outcome is outcome
    (failure,) = server.failures
    assert (failure.code, failure.detail) == (
        TOO_FEW_NEW_RECORDS,
        "data set 'movies' has fewer than 3 records since the job's start",
    )


def test_a_private_job_rehearses_nothing_and_is_not_rehearsed(
    make, enrolled, server, server_key, clipped, dataset, others
):
    daemon = make(enrolled, {"movies": dataset, "products": others.directories()["products"]})
    start = vouched(clipped, server_key)
    history = TrainingHistory(enrolled.trained)
    history.record(start[0].manifest.sha256, None, "products", TASK, others.directories()["products"])
    privacy = ExamplePrivacy(clip=0.5, noise_multiplier=1.0, sampling_rate=0.2)
    repeat = Repeat(every="7d", min_new_records=1_000)
    server.add_job(clipped, start=start, steps=2, privacy=privacy, repeat=repeat)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    run = enrolled.run("job-1")
    assert run.plan().earlier == {}
    assert not run.rehearsed.exists()
    assert history.behind(file_sha256(run.best)) == ()
