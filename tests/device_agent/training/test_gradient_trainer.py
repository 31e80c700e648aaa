"""Training by exact gradients on the real runtime: the steps by hand, kills at every call, and what is refused."""

import shutil

import numpy as np
import pytest

from device_agent.errors import Diverged
from device_agent.runtimes import Rates, open_runtime
from device_agent.training.checkpoints import CheckpointDirectory, Checkpoints
from device_agent.training.data import BatchSampler
from device_agent.training.gradient_trainer import trainer_of
from device_agent.training.journal import RunDirectory
from shared.zo.encoding import pack_step
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory

SETTINGS = {"steps": 13, "lr": 0.02, "schedule": "cosine", "seed": 11, "evaluation_interval": 4, "max_norm": 1.0}


class Killed(BaseException):
    """What ends a process in the middle of a call; nothing after it runs."""


class DyingRuntime:
    """A runtime whose process dies at the n-th call."""

    def __init__(self, runtime, calls):
        self.runtime, self.calls = runtime, calls

    def __getattr__(self, name):
        def call(*args):
            self.calls -= 1
            if self.calls < 0:
                raise Killed
            return getattr(self.runtime, name)(*args)

        return call


def train(run, plan, program, runtime=None, stop=lambda: False):
    if not run.path.exists():
        run.begin(plan)
    opened = runtime or open_runtime(plan.manifest, plan.program, plan.weights)
    splits = program.splits(plan.dataset, plan.training)
    return trainer_of(plan.manifest)(run, plan, splits, opened, lambda _: None, stop).train()


def read(path, program):
    return load_adapter(path.read_bytes(), program.manifest.size)


def outcome(run, result):
    facts = result.model_dump(exclude={"train_seconds", "seconds", "peak_rss_bytes"})
    return facts, run.best.read_bytes(), run.last.read_bytes(), (run.path / "trajectory.bin").read_bytes()


def test_a_run_is_the_steps_by_hand(run, gradient, dataset):
    plan = gradient.plan(dataset, **SETTINGS)
    result = train(run, plan, gradient)
    split, recipe = gradient.splits(dataset, plan.training).train, plan.manifest.recipe
    order = BatchSampler(11, tuple(example.correct for example in split), recipe.effective_batch)
    runtime = open_runtime(plan.manifest, plan.program, plan.weights)
    losses = []
    for step in range(13):
        batch = pack_step([split[index] for index in order.indices(step)], recipe, dynamic=True)
        losses.append(runtime.gradient_step(batch, Rates(plan.training.lr_at(step), 1.0))[0])
    np.testing.assert_allclose(read(run.last, gradient), runtime.adapter(), rtol=0, atol=1e-6)
    trajectory = parse_trajectory((run.path / "trajectory.bin").read_bytes())[0]
    np.testing.assert_allclose(trajectory.coefficients, losses, rtol=1e-5)
    assert result.steps == 13
    assert [item.step for item in result.evaluations if item.split == "validation"] == [0, 4, 8, 12, 13]
    runtime.close()


@pytest.mark.parametrize(
    ("name", "longest"), [("gradient", 17), pytest.param("directional", 50, marks=pytest.mark.slow)]
)
def test_killed_at_every_call_it_ends_with_the_same_bytes(request, run, name, longest, dataset, tmp_path):
    program = request.getfixturevalue(name)
    plan = program.plan(dataset, **SETTINGS)
    expected = outcome(run, train(run, plan, program))
    runtime = open_runtime(plan.manifest, plan.program, plan.weights, resident=True)
    pieces = RunDirectory(tmp_path / "pieces")
    kills = 0
    while True:
        try:
            # Each process lives a little longer than it takes to load, so that there is progress now and then.
            result = train(pieces, plan, program, DyingRuntime(runtime, 1 + kills % longest))
            break
        except Killed:
            kills += 1
            assert kills < 500
    assert kills > 10
    assert outcome(pieces, result) == expected
    assert len(pieces.checkpoints.steps()) <= 2
    runtime.close()


def test_a_rate_that_is_too_high_says_so(run, gradient, dataset):
    with pytest.raises(Diverged, match="lower lr"):
        train(run, gradient.plan(dataset, steps=20, lr=1e3, weight_decay=1e3), gradient)


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_checkpoints_are_kept_by_step(tmp_path, kind):
    checkpoints = Checkpoints() if kind == "memory" else CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.steps() == []
    assert checkpoints.read(3) is None
    states = {step: np.random.default_rng(step).standard_normal(5).astype(np.float32) for step in (3, 12, 7)}
    for step, state in states.items():
        checkpoints.write(step, state)
    assert checkpoints.steps() == [3, 7, 12]
    for step, state in states.items():
        np.testing.assert_array_equal(checkpoints.read(step), state)
    checkpoints.keep([12, 3])
    assert checkpoints.steps() == [3, 12]
    if kind == "directory":
        shutil.copy(tmp_path / "checkpoints" / "step-3.bin", tmp_path / "checkpoints" / "step-4.bin")
        assert checkpoints.read(4) is None
        assert CheckpointDirectory(checkpoints.path).steps() == [3, 4, 12]
