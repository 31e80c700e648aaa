"""Runs with an optimizer resume from checkpoints, because no trajectory replays its state."""

import numpy as np
import pytest

from shared.zo.trajectory import TrajectoryFile
from tests.device_agent.training.runs import begun, copy_run, hashes, last_b, ledger, train, train_until
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 24, "lr": 0.02, "schedule": "cosine", "seed": 11, "evaluation_interval": 7, "max_norm": 1.0}
SETTINGS |= {"weight_decay": 0.01}


@pytest.fixture
def unfinished(gradient, dataset, run):
    """A run that no executor has touched."""
    return begun(run.path, gradient.plan(dataset, **SETTINGS))


@pytest.fixture
def whole(unfinished, launcher, tmp_path):
    """The same run, trained without a disturbance."""
    run = copy_run(unfinished, tmp_path / "whole")
    train(run, launcher)
    return run


def test_a_damaged_checkpoint_is_not_used(unfinished, launcher, whole):
    train_until(unfinished, launcher, 12)
    assert unfinished.checkpoints.steps()
    for step in unfinished.checkpoints.steps():
        path = unfinished.checkpoints.path / f"step-{step}.bin"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        assert unfinished.checkpoints.read(step) is None
    train(unfinished, launcher)
    assert hashes(unfinished) == hashes(whole)


def test_checkpoints_of_another_run_are_not_used(unfinished, launcher, whole):
    """Whose ledger was moved away, or cut off before them."""
    other = np.ones(whole.checkpoints.read(SETTINGS["steps"]).shape, np.float32)
    for step in (0, 3, 10):
        unfinished.checkpoints.write(step, other)
    train_until(unfinished, launcher, 5)
    unfinished.checkpoints.write(20, other)
    train(unfinished, launcher)
    assert hashes(unfinished) == hashes(whole)


def test_a_run_with_a_proximal_term_resumes_from_its_start(gradient, dataset, tmp_path, launcher):
    """The pull moves B, leaves the optimizer's state, and is made again when steps are computed again."""
    plan = gradient.plan(dataset, **SETTINGS, proximal=0.4)
    whole, pieces = (begin_from(tmp_path / name, plan, random_b(gradient.manifest)) for name in ("whole", "pieces"))
    train(whole, launcher)
    for step in (3, 13):
        train_until(pieces, launcher, step)
    train(pieces, launcher)
    assert hashes(whole) == hashes(pieces)
    assert ledger(whole).proximal_factors[0] == np.float32(1 - 0.4 * SETTINGS["lr"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["native", "python"], indirect=True)
def test_b_is_that_of_the_ledger_even_if_a_step_comes_out_otherwise(directional, dataset, tmp_path, launcher):
    """As a step may that another executor made. It also holds after a checkpoint, and with pulls."""
    plan = directional.plan(dataset, **SETTINGS, proximal=0.4)
    run = begin_from(tmp_path / "run", plan, random_b(directional.manifest))
    train_until(run, launcher, 12)
    recorded = ledger(run)
    run.trajectory.unlink()
    changed = TrajectoryFile(run.trajectory, run.plan().header)
    for coefficients, factor in zip(recorded.coefficients, recorded.proximal_factors, strict=True):
        changed.append_step(coefficients * np.float32(1.01), factor)
    changed.close()
    assert train(run, launcher).steps == SETTINGS["steps"]
    last = last_b(run, directional)
    np.testing.assert_array_equal(ledger(run).replay(run.plan().begin_b()), last)
    assert run.checkpoints.read(SETTINGS["steps"]).size == 3 * last.size + 2
