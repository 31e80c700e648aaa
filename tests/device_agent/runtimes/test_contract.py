"""The runtime contract, over every runtime there is, against NumPy."""

import numpy as np
import psutil
import pytest

from device_agent.errors import RuntimeFailed
from device_agent.runtimes import open_runtime
from shared.recipe import LEDGER_ESTIMATORS
from shared.zo.encoding import pack_score, pack_step
from shared.zo.noise import query_seeds
from shared.zo.proximal import pull
from shared.zo.trajectory import Trajectory, TrajectoryHeader
from tests.device_agent.native import RunnerRuntime

LR, EPS = 0.05, 0.01


# Each kind of runtime, estimator and noise. The engines' contract shows that whole runs are alike for every program.
FAST = [("inprocess", "rademacher"), ("runner", "rademacher")]
SLOW = [("inprocess", "gaussian"), ("runner", "stored"), ("runner", "directional"), ("torch", "stored")]


@pytest.fixture(params=[*FAST, *(pytest.param(pair, marks=pytest.mark.slow) for pair in SLOW)], ids="-".join)
def pair(request):
    """A kind of runtime, and the name of the program that it runs."""
    return request.param


@pytest.fixture
def opened(request, pair):
    """Opens a program by one kind of runtime; whatever was opened is closed at the end."""
    kind, runtimes = pair[0], []

    def open_(program, path=None):
        path, weights = path or program.path("program"), program.path("weights")
        if kind == "runner":
            directory = request.getfixturevalue("runner_directory")
            runtime = RunnerRuntime(program.manifest, directory, path, weights)
        else:
            runtime = open_runtime(program.manifest, path, weights)
        runtimes.append(runtime)
        return runtime

    yield open_
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
def program(request, pair, compile_tiny):
    """The program that the runtime runs: torch takes one of another backend."""
    kind, name = pair
    if kind == "torch":
        return compile_tiny(f"torch-{name}", backend="torch", estimator="stored", loss="candidates", layers="last:1")
    return request.getfixturevalue(name)


@pytest.fixture
def runtime(program, opened):
    return opened(program)


def memory():
    """Resident bytes of this process and of those it started."""
    here = psutil.Process()
    return sum(process.memory_info().rss for process in (here, *here.children(recursive=True)))


@pytest.fixture
def examples(program, dataset):
    return program.splits(dataset, program.plan(dataset).training).train


def trajectory(program, coefficients):
    recipe = program.manifest.recipe
    header = TrajectoryHeader(
        job_id="j",
        job_seed=5,
        recipe_id=recipe.id,
        noise=recipe.noise,
        queries=recipe.queries,
        size=program.manifest.size,
    )
    return Trajectory(header, coefficients)


def some_b(program):
    return np.random.default_rng(1).normal(0, 0.1, program.manifest.size).astype(np.float32)


def train(runtime, program, examples, steps):
    """Steps on the first examples; returns every step's coefficients."""
    recipe = program.manifest.recipe
    batch = pack_step(examples[: recipe.effective_batch], recipe)
    return [runtime.step(batch, query_seeds(5, step, recipe.queries), LR, EPS)[1] for step in range(steps)]


def test_b_begins_at_zero_and_is_what_was_loaded(runtime, program):
    assert not runtime.adapter().any()
    flat = some_b(program)
    runtime.load(flat)
    np.testing.assert_array_equal(runtime.adapter(), flat)


def test_a_step_moves_b_by_its_coefficients(runtime, program, examples):
    start = some_b(program)
    runtime.load(start)
    coefficients = train(runtime, program, examples, 3)
    assert all(step_coefficients.shape == (program.manifest.recipe.queries,) for step_coefficients in coefficients)
    expected = trajectory(program, coefficients).replay(start)
    recipe = program.manifest.recipe
    if recipe.noise == "rademacher" and recipe.estimator in LEDGER_ESTIMATORS:
        np.testing.assert_array_equal(runtime.adapter(), expected)
    else:
        # Gaussian directions come from the runtime's own log and cosine, stored ones from differences of copies.
        np.testing.assert_allclose(runtime.adapter(), expected, atol=1e-6)


def test_replay_repeats_steps_bit_for_bit(runtime, program, examples):
    start = some_b(program)
    runtime.load(start)
    coefficients = train(runtime, program, examples, 4)
    trained = runtime.adapter()
    runtime.load(start)
    for step, step_coefficients in enumerate(coefficients):
        runtime.replay(query_seeds(5, step, program.manifest.recipe.queries), step_coefficients, EPS)
    np.testing.assert_array_equal(runtime.adapter(), trained)
    # What is left to do is repeated too: the next steps begin from the same copies of B.
    runtime.load(start)
    np.testing.assert_array_equal(train(runtime, program, examples, 5)[:4], coefficients)


def test_b_that_is_pulled_between_steps_is_repeated_bit_for_bit(runtime, program, examples):
    start, factor, recipe = some_b(program), np.float32(0.75), program.manifest.recipe
    batch = pack_step(examples[: recipe.effective_batch], recipe)
    runtime.load(start)
    coefficients = []
    for step in range(3):
        coefficients.append(runtime.step(batch, query_seeds(5, step, recipe.queries), LR, EPS)[1])
        runtime.load(pull(runtime.adapter(), start, factor))
    trained = runtime.adapter()
    runtime.load(start)
    for step, step_coefficients in enumerate(coefficients):
        runtime.replay(query_seeds(5, step, recipe.queries), step_coefficients, EPS)
        runtime.load(pull(runtime.adapter(), start, factor))
    np.testing.assert_array_equal(runtime.adapter(), trained)
    assert not np.array_equal(trajectory(program, coefficients).replay(start), trained)


def test_scoring_between_steps_changes_nothing(runtime, program, examples):
    """To the bit: what `stored` has not applied yet is carried over a switch of methods, not rounded into B."""
    start = some_b(program)
    runtime.load(start)
    train(runtime, program, examples, 4)
    undisturbed = runtime.adapter()
    runtime.load(start)
    batch = next(iter(pack_score(examples, program.manifest.recipe)))
    recipe = program.manifest.recipe
    step = pack_step(examples[: recipe.effective_batch], recipe)
    for number in range(4):
        runtime.score(batch.inputs)
        runtime.step(step, query_seeds(5, number, recipe.queries), LR, EPS)
    np.testing.assert_array_equal(runtime.adapter(), undisturbed)


@pytest.mark.parametrize("pair", FAST, ids="-".join)
def test_alternating_steps_and_scores_gathers_no_memory(runtime, program, examples):
    recipe = program.manifest.recipe
    step, score = pack_step(examples[: recipe.effective_batch], recipe), next(iter(pack_score(examples, recipe)))

    def alternate(times):
        for number in range(times):
            runtime.score(score.inputs)
            runtime.step(step, query_seeds(5, number, recipe.queries), LR, EPS)

    alternate(20)
    before = memory()
    alternate(150)
    # Methods loaded and unloaded within one program would leave 60 KB each behind, 18 MB in all.
    assert memory() - before < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("inprocess", "last"), ("runner", "directional"), ("torch", "stored")], ids="-".join)
def test_prefix_and_suffix_are_a_step(program, opened, examples):
    """To the bit, and whatever stands where no token is."""
    recipe = program.manifest.recipe
    whole, halves = opened(program), opened(program)
    for step in range(3):
        seeds = query_seeds(5, step, recipe.queries)
        batch_examples = examples[step : step + recipe.effective_batch]
        batch = pack_step(batch_examples, recipe, dynamic=True)
        hidden = halves.prefix(batch[0])
        assert hidden.shape == (*batch[0].shape, program.manifest.shape.hidden)
        for row, example in enumerate(batch_examples):
            hidden[row, len(example.correct_row.tokens) :] = 0
        for ours, theirs in zip(
            halves.suffix(hidden, batch[1:], seeds, LR, EPS), whole.step(batch, seeds, LR, EPS), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(halves.adapter(), whole.adapter())


def test_an_example_costs_its_length_and_answers_alike(runtime, program, examples):
    """A batch packed to its longest sequence gives what one packed to the recipe's length does."""
    assert program.manifest.dynamic_length
    recipe = program.manifest.recipe
    tight, wide = (pack_step(examples[:2], recipe, dynamic=dynamic) for dynamic in (True, False))
    assert tight[0].shape[1] < wide[0].shape[1] == recipe.sequence_length
    seeds = query_seeds(5, 0, recipe.queries)
    losses = []
    for batch in (tight, wide):
        runtime.load(np.zeros(program.manifest.size, np.float32))
        losses.append(runtime.step(batch, seeds, LR, EPS)[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_b_of_another_size_is_refused(runtime, program):
    with pytest.raises(ValueError, match="program of size"):
        runtime.load(np.zeros(program.manifest.size + 1, np.float32))


def test_files_that_are_no_program_are_named(program, opened, tmp_path):
    bad = tmp_path / "bad.pte"
    bad.write_bytes(b"not a program" * 100)
    with pytest.raises(RuntimeFailed, match="does not load"):
        opened(program, bad)


def test_inputs_of_another_shape_are_an_error(runtime, program, examples):
    recipe = program.manifest.recipe
    tokens, positions, *rest = pack_step(examples[:1], recipe)
    longer = np.pad(tokens, ((0, 0), (0, 1)))
    for batch in ((longer, positions, *rest), (tokens[:-1], positions, *rest), (tokens, positions[:, :-1], *rest)):
        with pytest.raises(RuntimeFailed, match="method 'step'"):
            runtime.step(batch, query_seeds(0, 0, recipe.queries), LR, EPS)


@pytest.mark.parametrize("pair", FAST, ids="-".join)
def test_a_method_that_the_program_lacks_is_named(runtime):
    with pytest.raises(RuntimeFailed, match="no method 'prefix'"):
        runtime.prefix(np.zeros((4, 8), np.int64))
