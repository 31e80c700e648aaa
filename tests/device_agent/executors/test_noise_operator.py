"""Programs that call the paper's noise operator, on the runner that has its kernel, against NumPy's directions."""

import numpy as np
import pytest

from device_agent.errors import RuntimeFailed
from device_agent.executors.python import open_program
from device_agent.executors.runner import RunnerLauncher
from shared.zo.encoding import pack_step
from shared.zo.noise import gaussian, query_seeds
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.native import opened_by_runner
from tests.device_agent.training.runs import begun, last_b, ledger, train
from tests.device_agent.warm_starts import random_b

LR, EPS = 0.05, 0.01


@pytest.fixture(scope="module")
def operator(compile_tiny):
    return compile_tiny("operator", estimator="stored", noise="operator")


@pytest.fixture(scope="module")
def twin(compile_tiny):
    """The same recipe with the same noise drawn in the graph."""
    return compile_tiny("twin", estimator="stored", noise="gaussian")


@pytest.fixture
def opened(runner_directory):
    """Opens a program by the native runner."""
    runtimes = []

    def open_(program):
        paths = program.path("program"), program.path("weights")
        runtimes.append(opened_by_runner(program.manifest, runner_directory, *paths))
        return runtimes[-1]

    yield open_
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def batch(operator, dataset):
    examples = operator.splits(dataset, operator.plan(dataset).training).train
    return pack_step(examples[:4], operator.manifest.recipe)


def normals(seeds, size):
    """The reference directions (q, D)."""
    return np.stack([gaussian((int(first), int(second)), size) for first, second in seeds])


def steps(runtime, program, batch, count):
    """Every step's coefficients."""
    return [
        runtime.step(batch, query_seeds(5, step, program.manifest.recipe.queries), LR, EPS)[1] for step in range(count)
    ]


@pytest.mark.slow
def test_every_querys_direction_is_the_references(operator, opened):
    """From B = 0 a coefficient of 1 leaves -z."""
    runtime, manifest = opened(operator), operator.manifest
    seeds = query_seeds(2**40, 3, manifest.recipe.queries)
    for query, expected in enumerate(normals(seeds, manifest.size)):
        runtime.load(np.zeros(manifest.size, np.float32))
        runtime.replay(seeds, np.eye(manifest.recipe.queries, dtype=np.float32)[query], EPS)
        np.testing.assert_allclose(-runtime.adapter(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_is_the_one_with_the_noise_in_the_graph(operator, twin, opened, batch):
    step_outputs, ends = [], []
    for program in (operator, twin):
        runtime = opened(program)
        runtime.load(random_b(program.manifest))
        step_outputs.append(steps(runtime, program, batch, 4))
        ends.append(runtime.adapter())
    # Nothing may differ but how logarithm and cosine round, which is the compiler's to choose.
    np.testing.assert_allclose(*step_outputs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-4)
    assert np.abs(step_outputs[0]).max() > 1e-2
    assert operator.path("program").stat().st_size < twin.path("program").stat().st_size


def until_step(count, data):
    """A ledger's bytes to its `count`-th step."""

    def steps_in(part):
        trajectory, _ = parse_trajectory(part)
        return trajectory.steps if trajectory else 0

    return next(data[:end] for end in range(len(data)) if steps_in(data[:end]) == count)


@pytest.mark.slow
def test_a_whole_run_replays_from_its_ledger_and_resumes_in_the_middle(operator, dataset, tmp_path, runner_directory):
    plan, size = operator.plan(dataset, steps=6, lr=LR, seed=11, evaluation_interval=3), operator.manifest.size
    launcher = RunnerLauncher(runner_directory)
    run, resumed = begun(tmp_path / "run", plan), begun(tmp_path / "resumed", plan)
    assert train(run, launcher).steps == 6
    trained = last_b(run, operator)
    assert ledger(run).header.noise == "operator"
    np.testing.assert_allclose(trained, ledger(run).replay(np.zeros(size, np.float32)), rtol=0, atol=1e-5)
    assert np.abs(trained).max() > 1e-2
    resumed.trajectory.write_bytes(until_step(3, run.trajectory.read_bytes()))
    assert train(resumed, launcher).steps == 6
    np.testing.assert_array_equal(last_b(resumed, operator), trained)


@pytest.mark.slow
def test_the_python_runtime_names_what_is_needed(operator):
    with pytest.raises(RuntimeFailed, match="train with the native runner: pip install mobizo-runner") as error:
        open_program(operator.manifest, operator.path("program"), operator.path("weights"))
    assert "\n" not in error.value.detail
