"""Runs that start from an adapter, and runs of a cohort's round: pulls, stops, and which B is uploaded."""

from datetime import UTC, datetime

import numpy as np
import pytest

from device_agent.errors import Stopped
from shared.errors import Untrusted
from shared.federation.cohort import AlgorithmSettings, RoundTask
from shared.zo.noise import query_seeds
from shared.zo.noise import rademacher as noise
from tests.device_agent.training.runs import (
    after_calls,
    begun,
    hashes,
    last_b,
    ledger,
    train,
    train_in_process,
)
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 12, "lr": 0.3, "schedule": "cosine", "seed": 3, "evaluation_interval": 5}
MU = 0.4


def begin(path, program, dataset, start=True):
    algorithm = AlgorithmSettings(name="fedprox", mu=MU)
    task = RoundTask(cohort="reviews", number=3, algorithm=algorithm, deadline=datetime(2030, 1, 1, tzinfo=UTC))
    plan = program.plan(dataset, **SETTINGS).model_copy(update={"round": task})
    return begin_from(path, plan, random_b(program.manifest)) if start else begun(path, plan)


def test_b_is_what_the_coefficients_and_the_pulls_say(launcher, rademacher, dataset, tmp_path):
    """Element by element in float32, from FedProx's formula; the ledger's own replay agrees to the bit."""
    run = begin(tmp_path / "run", rademacher, dataset)
    result = train(run, launcher)
    trajectory, size = ledger(run), rademacher.manifest.size
    expected = start = random_b(rademacher.manifest)
    for step, coefficients in enumerate(trajectory.coefficients):
        for seed, coefficient in zip(query_seeds(3, step, 2).tolist(), coefficients, strict=True):
            expected = np.subtract(expected, coefficient * noise(tuple(seed), size), dtype=np.float32)
        rate = 0.3 * (1 + np.cos(np.pi * step / 12)) / 2
        assert trajectory.proximal_factors[step] == np.float32(1 - MU * rate)
        away = np.subtract(expected, start, dtype=np.float32) * trajectory.proximal_factors[step]
        expected = np.add(start, away, dtype=np.float32)
    last = last_b(run, rademacher)
    assert trajectory.header.proximal == MU
    np.testing.assert_array_equal(last, expected)
    np.testing.assert_array_equal(trajectory.replay(start), expected)
    assert result.best_step == SETTINGS["steps"]


@pytest.mark.parametrize("calls", [4, 13])
def test_stored_pulls_again_by_its_two_rounded_copies_of_b(launcher, stored, dataset, tmp_path, calls):
    """Stopped in this process, which the native runner's bytes are compared with."""
    whole, run = (begin(tmp_path / name, stored, dataset, start=False) for name in ("whole", "run"))
    train(whole, launcher)
    with pytest.raises(Stopped):
        train_in_process(run, run.plan(), stored, after_calls(calls))
    assert ledger(run).steps < SETTINGS["steps"]
    train_in_process(run, run.plan(), stored)
    assert hashes(run) == hashes(whole)


def test_a_start_that_is_another_file_is_refused(launcher, rademacher, dataset, tmp_path):
    run = begin(tmp_path / "run", rademacher, dataset)
    run.start.write_bytes(run.start.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(Untrusted, match="not the adapter"):
        train(run, launcher)
    assert not run.trajectory.exists()
