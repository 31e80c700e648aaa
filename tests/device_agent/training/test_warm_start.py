"""Jobs that go on from an adapter, in the daemon: what it fetches, what it refuses, and that kills cost nothing."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.start_choice import WHY
from device_agent.training.batch_sampler import BatchSampler
from shared.errors import StartDeleted
from shared.job import JobStart
from shared.registry import SignedAdapter
from shared.signing import new_private_key, sign_adapter
from shared.training_settings import TrainingSettings
from tests.device_agent.training.runs import answer_log_p, last_b, ledger, train
from tests.device_agent.warm_starts import begin_from, random_b, vouched
from tests.server.compiler import reference

TRAINING = {"steps": 4, "evaluation_interval": 2}


@pytest.fixture
def start(rademacher, server_key):
    return vouched(rademacher, server_key)


def test_a_job_goes_on_from_the_version_that_it_names(daemon, server, rademacher, home, start):
    server.add_job(rademacher, start=start, **TRAINING)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    run = home.run("job-1")
    trajectory = ledger(run)
    assert trajectory.header.start_sha256 == start[0].manifest.sha256
    last = last_b(run, rademacher)
    np.testing.assert_array_equal(last, trajectory.replay(random_b(rademacher.manifest)))
    (completion,) = server.completions
    assert completion.result.zero_shot_accuracy is None
    assert completion.result.start_accuracy == completion.result.evaluations[0].accuracy


def failure_of(daemon, server):
    """The reason that the server was given for a job that failed here."""
    assert daemon.run(once=True).outcome is Outcome.FAILED
    (failure,) = server.failures
    assert not server.completions
    return failure


def flip_last_bit(signed, data):
    return signed, data[:-1] + bytes([data[-1] ^ 1])


def of_another_server(signed, data):
    false = sign_adapter(signed.manifest, new_private_key())
    return SignedAdapter(**dict(false) | {"key_id": signed.key_id}), data


@pytest.mark.parametrize(
    ("facts", "harm", "words"),
    [
        ({}, flip_last_bit, "sha256"),
        ({}, of_another_server, "signature"),
        ({"a_sha256": "0" * 64}, None, "frozen A"),
    ],
)
def test_a_start_that_is_not_what_its_manifest_says_or_does_not_fit_is_refused(
    daemon, server, rademacher, server_key, home, facts, harm, words
):
    start = vouched(rademacher, server_key, **facts)
    server.add_job(rademacher, start=harm(*start) if harm else start, **TRAINING)
    failure = failure_of(daemon, server)
    assert failure.code == "untrusted"
    assert words in failure.detail
    assert not home.run("job-1").start.exists()


def test_another_version_than_the_jobs_and_one_that_was_deleted_meanwhile(
    daemon, server, rademacher, server_key, start
):
    for served, code in ((vouched(rademacher, server_key, version=2), "untrusted"), ((None, b""), StartDeleted.code)):
        server.add_job(rademacher, start=start, **TRAINING)
        server.starts["job-1"] = served
        assert failure_of(daemon, server).code == code
        server.failures.clear()


def by_the_stock_model(base, program, dataset, flat):
    """The order of a B (D,): less is better. Minus the accuracy, and the loss, on the validation records."""
    model, scores = AutoModelForCausalLM.from_pretrained(base).eval(), []
    examples = program.splits(dataset, TrainingSettings()).validation
    with torch.no_grad(), reference.lora(model, program.manifest.recipe, program.manifest.shape, flat):
        for example in examples:
            scores.append([float(answer_log_p(model, row).sum()) for row in example.rows])
    right = [example.correct for example in examples]
    accuracy = np.mean([np.argmax(row) == correct for row, correct in zip(scores, right, strict=True)])
    return -accuracy, -np.mean([row[correct] for row, correct in zip(scores, right, strict=True)])


@pytest.mark.parametrize("deleted", [False, True])
def test_the_best_start_is_taken_and_the_server_learns_nothing_but_its_name(
    daemon, server, rademacher, server_key, home, base, dataset, deleted
):
    """deleted: the best one of the lease is gone when the device asks for it."""
    flats = [np.zeros(rademacher.manifest.size, np.float32)]
    flats += [random_b(rademacher.manifest, seed) for seed in (1, 2, 3)]
    orders = [by_the_stock_model(base, rademacher, dataset, flat) for flat in flats]
    candidates = [vouched(rademacher, server_key, seed, adapter=f"alice-{seed}") for seed in (1, 2, 3)]
    server.add_job(rademacher, candidates=candidates, **TRAINING)
    best = orders.index(min(orders))
    assert best > 0
    if deleted:
        gone = candidates[best - 1][0].manifest
        del server.versions[gone.adapter, gone.revision]
        orders[best] = (1.0, 0.0)
        best = orders.index(min(orders))
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    run, manifest = home.run("job-1"), candidates[best - 1][0].manifest
    assert server.chosen == [JobStart(adapter=manifest.adapter, revision=manifest.revision) if best else None]
    assert ledger(run).header.start_sha256 == (manifest.sha256 if best else None)
    np.testing.assert_array_equal(last_b(run, rademacher), ledger(run).replay(flats[best]))
    assert not run.candidates.exists()
    comparing = [beat for beat in server.beats if beat.why == WHY]
    assert all((beat.loss, beat.accuracy, beat.validation_loss) == (None, None, None) for beat in comparing)
    texts = [json.loads(line)["text"] for line in (dataset / "validation.jsonl").read_text().splitlines()]
    assert not any(text.encode() in server.received_bytes for text in texts)


def test_a_candidate_that_does_not_fit_is_refused(daemon, server, rademacher, server_key):
    candidates = [vouched(rademacher, server_key, a_sha256="0" * 64)]
    server.add_job(rademacher, candidates=candidates, **TRAINING)
    assert failure_of(daemon, server).code == "untrusted"
    assert not server.chosen


def divergence_gradient(base, program, examples, flat, start, weight):
    """The gradient (D,) of mean nll + weight x mean KL(start || B) of the examples' answer tokens, by autograd."""
    model = AutoModelForCausalLM.from_pretrained(base).eval()

    def log_p(b):
        with reference.lora(model, program.manifest.recipe, program.manifest.shape, b):
            rows = [example.rows[example.correct] for example in examples]
            return torch.cat(
                [model(torch.tensor([row.tokens])).logits[0, [at for at, _ in row.targets]] for row in rows]
            ).log_softmax(-1)

    b = torch.from_numpy(flat.copy()).requires_grad_()
    truth = torch.tensor([token for example in examples for _, token in example.rows[example.correct].targets])
    ours, theirs = log_p(b), log_p(torch.from_numpy(start)).detach()
    divergence = torch.nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    loss = torch.nn.functional.nll_loss(ours, truth) + weight * divergence
    return torch.autograd.grad(loss, b)[0].numpy()


def test_a_divergence_pulls_the_model_back_to_its_start(launcher, base, compile_tiny, dataset, tmp_path):
    """The second step of a run that goes on from an adapter, by the native runner."""
    settings = {"estimator": "gradient", "optimizer": "sgd", "layers": "last:1", "queries": 1}
    program = compile_tiny("divergence", kl=True, **settings)
    training = {"lr": 0.3, "kl_weight": 2.0, "evaluation_interval": 9}
    start = random_b(program.manifest)
    after = []
    for steps in (1, 2):
        run = begin_from(tmp_path / f"run-{steps}", program.plan(dataset, steps=steps, **training), start)
        train(run, launcher)
        after.append(last_b(run, program))
    splits = program.splits(dataset, TrainingSettings())
    order = BatchSampler.of(splits.train, 0, program.manifest.recipe.examples_per_step)
    examples = [splits.train[index] for index in order.indices(1)]
    expected = divergence_gradient(base, program, examples, after[0], start, training["kl_weight"])
    assert np.linalg.norm((after[0] - after[1]) / 0.3 - expected) < 1e-3 * np.linalg.norm(expected)
