"""Server optimizers against the papers' formulas, written out here element by element over several rounds."""

import math

import numpy as np
import pytest

from shared.federation.cohort import OptimizerSettings
from shared.federation.optimizers import advance, initial_state, load_state

SIZE, ROUNDS = 8192 + 300, 5


def updates():
    return np.random.default_rng(0).normal(scale=1e-2, size=(ROUNDS, SIZE)).astype(np.float32)


def run(settings, rounds=ROUNDS, *, stored=False):
    flat, state = np.random.default_rng(1).normal(size=SIZE).astype(np.float32), initial_state(settings, SIZE)
    for update in updates()[:rounds]:
        if stored:
            state = load_state(state.dump(), settings, SIZE)
        flat, state = advance(settings, state, flat, update)
    return flat, state


def reference(settings, element):
    """One element through all rounds, in Python's float64, as Reddi et al. (algorithm 2) and Hsu et al. write it."""
    x = float(np.random.default_rng(1).normal(size=SIZE).astype(np.float32)[element])
    m, v = 0.0, settings.eps * settings.eps
    for delta in (float(update[element]) for update in updates()):
        if settings.name == "sgd":
            x = x + settings.lr * delta
        elif settings.name == "momentum":
            m = settings.beta1 * m + delta
            x = x + settings.lr * m
        else:
            m = settings.beta1 * m + (1 - settings.beta1) * delta
            v = settings.beta2 * v + (1 - settings.beta2) * delta * delta
            x = x + settings.lr * m / (math.sqrt(v) + settings.eps)
    return x


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(name="sgd", lr=0.7),
        OptimizerSettings(name="momentum", lr=0.5, beta1=0.8),
        OptimizerSettings(name="adam", lr=0.1, beta1=0.9, beta2=0.95, eps=1e-3),
    ],
    ids=lambda settings: settings.name,
)
def test_each_optimizer_follows_its_formula_in_every_block(settings):
    flat, state = run(settings)
    assert state.rounds == ROUNDS
    for element in (0, 1, 8191, 8192, SIZE - 1):
        assert flat[element] == pytest.approx(reference(settings, element), rel=0, abs=2e-6)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_a_stored_optimizer_state_resumes_bit_for_bit(name):
    settings = OptimizerSettings(name=name)
    in_memory, stored = run(settings), run(settings, stored=True)
    assert in_memory[0].tobytes() == stored[0].tobytes()
    assert in_memory[1].dump() == stored[1].dump()


ADAM = OptimizerSettings(name="adam")
ADAM_STATE = initial_state(ADAM, 4).dump()


@pytest.mark.parametrize(
    ("data", "settings", "size", "message"),
    [
        (b"", ADAM, 4, "not the state"),
        (ADAM_STATE[:-1], ADAM, 4, "not the state"),
        (b"\x02\0\0\0\0\0\0\0{}", OptimizerSettings(), 4, "not the state"),
        (ADAM_STATE, OptimizerSettings(name="momentum"), 4, "not to momentum"),
        (ADAM_STATE, ADAM, 5, "D = 4"),
    ],
)
def test_another_state_is_refused(data, settings, size, message):
    with pytest.raises(ValueError, match=message):
        load_state(data, settings, size)
