"""The contract of executors, against ExecuTorch's Python runtime, which tests/server/compiler holds to the paper.

Another kind of executor passes the same tests: its module imports everything here and has fixtures `pair` and
`launcher` of its own.
"""

import re

import numpy as np
import pytest

from device_agent.errors import RuntimeFailed
from device_agent.executors.program import TrainingProgram
from device_agent.executors.python import PythonLauncher, open_program
from device_agent.executors.runner import RunnerLauncher
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step
from tests.device_agent.warm_starts import random_b

LR, EPS = 0.05, 0.01

# Each kind of executor, estimator and noise. tests/device_agent/training has whole runs of every program.
FAST = [("native", "rademacher"), ("python", "rademacher")]
SLOW = [("native", "stored"), ("native", "directional")]


@pytest.fixture(params=[*FAST, *(pytest.param(pair, marks=pytest.mark.slow) for pair in SLOW)], ids="-".join)
def pair(request):
    """A kind of executor, and the name of the program that it runs."""
    return request.param


@pytest.fixture
def launcher(request, pair):
    return RunnerLauncher(request.getfixturevalue("runner_directory")) if pair[0] == "native" else PythonLauncher()


@pytest.fixture
def program(request, pair):
    """The compiled program."""
    return request.getfixturevalue(pair[1])


@pytest.fixture
def runtime(program, launcher):
    opened = TrainingProgram(program.manifest, launcher.launch(program.manifest, *program.files))
    yield opened
    opened.close()


@pytest.fixture
def examples(program, dataset):
    return program.examples(dataset)


def outputs_of_every_method(runtime, program, examples):
    """Calls every method of a program, by turns; returns all that they answer."""
    recipe, methods = program.manifest.recipe, program.manifest.methods
    runtime.load(random_b(program.manifest))
    scores, outputs = next(iter(pack_score(examples, recipe))).inputs, []
    for step in range(3):
        seeds = query_seeds(5, step, recipe.queries)
        batch = pack_step(examples[step : step + recipe.effective_batch], recipe, dynamic=True)
        losses, coefficients = runtime.step(batch, seeds, LR, EPS)
        outputs += [losses, coefficients, runtime.score(scores)]
        if "suffix" in methods:
            hidden = runtime.prefix(batch[0])
            outputs += [hidden, *runtime.step(batch[1:], seeds, LR, EPS, hidden=hidden)]
        runtime.replay(seeds, coefficients, EPS)
        outputs.append(runtime.adapter())
    if "score_suffix" in methods:
        shape = (*scores[0].shape, program.manifest.shape.hidden)
        hidden = np.random.default_rng(2).normal(0, 1, shape).astype(np.float32)
        outputs.append(runtime.score(scores[1:], hidden))
    return outputs


def test_every_method_answers_as_in_a_process_without_pipes(runtime, program, examples):
    """To the bit: on one machine the native runner links the ExecuTorch of the Python runtime."""
    in_process = open_program(program.manifest, *program.files)
    expected = outputs_of_every_method(in_process, program, examples)
    in_process.close()
    for ours, theirs in zip(outputs_of_every_method(runtime, program, examples), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_b_begins_at_zero_and_is_what_was_loaded(runtime, program):
    assert not runtime.adapter().any()
    flat = random_b(program.manifest)
    runtime.load(flat)
    np.testing.assert_array_equal(runtime.adapter(), flat)
    with pytest.raises(ValueError, match="program of size"):
        runtime.load(np.zeros(program.manifest.size + 1, np.float32))


def test_scoring_between_steps_changes_nothing(runtime, program, examples):
    """To the bit: what `stored` has not applied yet is carried over a switch of methods, not rounded into B."""
    recipe, adapters = program.manifest.recipe, []
    batch = next(iter(pack_score(examples, recipe)))
    step = pack_step(examples[: recipe.effective_batch], recipe)
    for scores in (False, True):
        runtime.load(random_b(program.manifest))
        for number in range(4):
            if scores:
                runtime.score(batch.inputs)
            runtime.step(step, query_seeds(5, number, recipe.queries), LR, EPS)
        adapters.append(runtime.adapter())
    np.testing.assert_array_equal(*adapters)


def test_wrong_calls_are_errors_after_which_the_executor_goes_on(runtime, program, examples):
    recipe, expected = program.manifest.recipe, random_b(program.manifest)
    runtime.load(expected)
    tokens, positions, *rest = pack_step(examples[:1], recipe)
    longer = np.pad(tokens, ((0, 0), (0, 1)))
    for batch in ((longer, positions, *rest), (tokens[:-1], positions, *rest), (tokens, positions[:, :-1], *rest)):
        with pytest.raises(RuntimeFailed, match="method 'step'"):
            runtime.step(batch, query_seeds(0, 0, recipe.queries), LR, EPS)
    with pytest.raises(RuntimeFailed, match=re.escape("no method 'extend'")):
        runtime._call("extend", np.zeros((4, 8), np.int64))
    np.testing.assert_array_equal(runtime.adapter(), expected)
