"""Training by exact gradients on the real runtimes, and kills of every trainer at every call."""

import numpy as np
import pytest

from device_agent.errors import Diverged
from device_agent.executors.program import Rates
from device_agent.training.batch_sampler import BatchSampler
from device_agent.training.prefix import prefix_cache
from device_agent.training.run_directory import RunDirectory
from device_agent.training.trainer import drop_tokens
from shared.zo.packing import pack_step, step_texts
from tests.device_agent.training.runs import (
    hashes,
    last_b,
    ledger,
    opened,
    train,
    train_in_process,
    train_with_kills,
)
from tests.device_agent.training.test_reference_texts import plan_of

SETTINGS = {"steps": 13, "lr": 0.02, "schedule": "cosine", "seed": 11, "evaluation_interval": 4, "max_norm": 1.0}


@pytest.mark.parametrize("share", [0, 0.3])
def test_a_run_is_the_steps_by_hand(run, gradient, dataset, launcher, share):
    """By the native runner, whose methods share packed weights; by hand in ExecuTorch's Python runtime."""
    plan = gradient.plan(dataset, **SETTINGS, token_dropout=share)
    run.begin(plan)
    result = train(run, launcher)
    split, recipe = gradient.splits(dataset, plan.training).train, plan.manifest.recipe
    order = BatchSampler.of(split, 11, recipe.effective_batch)
    runtime = opened(plan)
    frozen = prefix_cache(runtime, plan.manifest, dynamic=True)
    losses = []
    for step in range(13):
        whole = [split[index] for index in order.indices(step)]
        examples, kept = drop_tokens(zip(order.indices(step), whole, strict=True), recipe, share, 11, step)
        tokens, *labels = pack_step(examples, recipe, dynamic=True)
        hidden = frozen.hidden(step_texts(whole, recipe), tokens.shape, kept=kept)
        rates = Rates(plan.training.lr_at(step), 1.0)
        losses.append(runtime.gradient_step(tuple(labels), rates, hidden=hidden)[0])
    np.testing.assert_allclose(last_b(run, gradient), runtime.adapter(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(ledger(run).coefficients, losses, rtol=1e-5)
    assert result.steps == 13
    runtime.close()


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("rademacher", 40),
        ("gradient", 17),
        pytest.param("stored", 60, marks=pytest.mark.slow),
        pytest.param("directional", 50, marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_call_it_ends_with_the_same_bytes(request, run, name, longest, dataset, tmp_path):
    program = request.getfixturevalue(name)
    plan = plan_of(program, dataset, **SETTINGS, token_dropout=0.3)  # it measures reference texts, too
    expected = train_in_process(run, plan, program)
    pieces = RunDirectory(tmp_path / "pieces")
    result = train_with_kills(pieces, plan, program, longest)
    measured = {"train_seconds", "seconds", "peak_rss_bytes"}
    assert result.model_dump(exclude=measured) == expected.model_dump(exclude=measured)
    assert hashes(pieces) == hashes(run)
    assert len(pieces.checkpoints.steps()) <= 2


def test_a_rate_that_is_too_high_says_so(run, gradient, dataset):
    with pytest.raises(Diverged, match="lower lr"):
        train_in_process(run, gradient.plan(dataset, steps=20, lr=1e3, weight_decay=1e3), gradient)
