"""`bench variance` predicts from moments of gradients: they and the closed forms agree with NumPy and autograd."""

import itertools
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.zo.lora import LoraModule, init_a, lora_modules
from tests.server.compiler.conftest import TinyBase, make_tiny

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.rounding import rounded
    from bench.tiny import TASK, WORDS, write_base
    from bench.variance import choices_of_a
    from bench.variance.command import Effort, measure
    from bench.variance.data import DataSet
    from bench.variance.estimator import (
        alignment,
        alignment_with_mean,
        batch_variance,
        cosines_squared,
        descent,
        direction_variance,
        means_of_runs,
    )
    from bench.variance.gradients import LinearGradients, MomentRecorder, Moments, layer_sums, pair_moments, record
    from server.compiler import inspect_base
    from server.compiler.model.quantization import linear, quantize, target_scheme

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")

E, S, VOCABULARY = 3, 7, 96
RANK = 4
Batch = tuple[np.ndarray, ...]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_tiny(tmp_path_factory.mktemp("base"))


class Tiny:
    """A watched model, and batches of sequences of different lengths."""

    def __init__(self, base: TinyBase) -> None:
        sizes = {"rank": RANK, "effective_batch": E, "answer_length": 1, "choices": 2}
        self.recipe = base.recipe(loss="candidates", sequence_length=S, **sizes)
        shape = inspect_base(str(base.directory))
        self.adapted = AdaptedModel(base.model, self.recipe, shape)
        self.modules: tuple[LoraModule, ...] = lora_modules(self.recipe, shape)
        self.gradients = LinearGradients(self.adapted, self.modules)

    def close(self) -> None:
        self.gradients.remove()
        self.adapted.remove()

    def batch(self, number: int) -> Batch:
        rng = np.random.default_rng(number)
        tokens, lengths = rng.integers(1, VOCABULARY, (E, S)), rng.integers(2, S + 1, (E, 1))
        tokens[np.arange(S) >= lengths] = 0
        choices = rng.permuted(np.tile(np.arange(VOCABULARY), (E, 1)), axis=1)[:, None, :2]
        return tokens, lengths - 1, choices, np.ones((E, 1, 2), np.float32), np.ones((E, 1), np.float32)

    def gradient(self, batch: Batch) -> np.ndarray:
        """Of B, by autograd through the LoRA itself: float64 (D,)."""
        b = self.adapted.zeros().requires_grad_()
        (found,) = torch.autograd.grad(self.adapted.losses(batch, b.unsqueeze(0)).sum(), b)
        return np.asarray(found.double())

    def each(self, batch: Batch) -> list[np.ndarray]:
        """The gradient of each example alone."""
        return [self.gradient(tuple(array[e : e + 1] for array in batch)) for e in range(E)]


@pytest.fixture
def tiny(base: TinyBase) -> "Tiny":
    made = Tiny(base)
    yield made
    made.close()


def test_sums_of_layers_give_the_gradient_of_b_under_any_a(tiny: Tiny) -> None:
    batches = [tiny.batch(number) for number in range(2)]
    sums = layer_sums(tiny.gradients, batches, {"v_proj"})
    found = [
        (init_a(tiny.recipe, m) * tiny.recipe.scale).T @ sums.gradients[m.name].numpy() / (2 * E) for m in tiny.modules
    ]
    expected = np.mean([tiny.gradient(batch) for batch in batches], axis=0)
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in found]), expected, rtol=1e-3, atol=1e-7)


def test_activations_leave_out_the_padding(tiny: Tiny) -> None:
    batch = tiny.batch(0)
    sums = layer_sums(tiny.gradients, [batch], {"q_proj"})
    kept: list[torch.Tensor] = []
    module = dict(tiny.adapted.model.named_modules())["model.layers.1.self_attn.q_proj"]
    handle = module.register_forward_hook(lambda _module, inputs, _output: kept.append(inputs[0]))
    with torch.no_grad():
        for row, end in zip(batch[0], batch[1][:, 0], strict=True):
            tiny.adapted.model(torch.from_numpy(row[: end + 1])[None])
    handle.remove()
    inputs = torch.cat([x[0] for x in kept])
    found = sums.activations["model.layers.1.self_attn.q_proj"]
    torch.testing.assert_close(found, inputs.T @ inputs, rtol=1e-4, atol=1e-5)
    assert {name.rpartition(".")[2] for name in sums.activations} == {"q_proj"}


def test_moments_are_those_of_single_examples_gradients(tiny: Tiny) -> None:
    batches = [tiny.batch(number) for number in range(4)]
    columns = {m.name: init_a(tiny.recipe, m) for m in tiny.modules}
    recorder = MomentRecorder({"kaiming": columns}, (2, RANK), energy=5.0)
    record(tiny.gradients, batches, [recorder])
    each = [tiny.each(batch) for batch in batches]
    for rank in (2, RANK):
        # A's first columns at |A|_F^2 = 5: of B's gradient the first rows, by what these columns were multiplied with.
        factor = np.zeros_like(each[0][0])
        for m in tiny.modules:
            rows = factor[m.offset : m.offset + m.size].reshape(m.rank, -1)
            rows[:rank] = np.sqrt(5.0 / (columns[m.name][:, :rank] ** 2).sum()) / tiny.recipe.scale
        g = [[example * factor for example in batch] for batch in each]
        halves = [np.mean(g[0] + g[2], axis=0), np.mean(g[1] + g[3], axis=0)]
        pairs = [(a @ b) ** 2 for batch in g for a, b in itertools.permutations(batch, 2)]
        triples = [(a @ b) * (a @ c) for batch in g for a, b, c in itertools.permutations(batch, 3)]
        expected = (halves[0] @ halves[1], np.mean([a @ a for batch in g for a in batch]), np.mean(pairs))
        found = recorder.moments("kaiming", rank, columns)
        scale = found.total
        assert found.signal == pytest.approx(expected[0], rel=1e-3, abs=1e-5 * scale)
        assert found.total == pytest.approx(expected[1], rel=1e-4)
        assert found.square == pytest.approx(expected[2], rel=1e-3, abs=1e-5 * scale**2)
        assert found.along == pytest.approx(np.mean(triples), rel=1e-3, abs=1e-5 * scale**2)


POPULATION = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 2.0], [3.0, 1.0, 1.0], [0.0, 0.5, -0.25]])
SECOND = POPULATION.T @ POPULATION / len(POPULATION)
MEAN = POPULATION.mean(0)
EXACT = Moments(
    signal=float(MEAN @ MEAN),
    total=float(np.trace(SECOND)),
    square=float(np.trace(SECOND @ SECOND)),
    along=float(MEAN @ SECOND @ MEAN),
)


def test_moments_from_batches_are_unbiased() -> None:
    batches = [POPULATION[list(drawn)] for drawn in itertools.product(range(4), repeat=3)]  # all, each as likely
    found = pair_moments([batch @ batch.T for batch in batches])
    np.testing.assert_allclose(found, (EXACT.total, EXACT.square, EXACT.along))


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_top_gradient_captures_the_most(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    g = rng.normal(size=shape)
    values = np.linalg.svd(g, compute_uv=False)
    gradient = torch.from_numpy(g)
    columns = choices_of_a.top_gradient(gradient, 5)
    most = choices_of_a.most_captured(gradient, 5)
    for rank in (1, 3, 5):
        assert choices_of_a.captured(columns[:, :rank], gradient) == pytest.approx((values[:rank] ** 2).mean())
        assert most[rank - 1] == pytest.approx((values[:rank] ** 2).mean())
    # A random A lets 1 / in of everything through, on average.
    drawn = [choices_of_a.captured(rng.normal(size=(shape[0], 5)), gradient) for _ in range(400)]
    assert np.mean(drawn) == pytest.approx((g**2).sum() / shape[0], rel=0.1)


def test_top_activations_are_right_singular_vectors() -> None:
    x = np.random.default_rng(2).normal(size=(30, 8)) * np.arange(1, 9)
    _, _, vectors = np.linalg.svd(x)
    found = choices_of_a.top_activations(torch.from_numpy(x.T @ x), 3)
    np.testing.assert_allclose(np.abs(found.T @ vectors[:3].T), np.eye(3), atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_gaussian_alignment_and_variance_are_as_in_the_closed_forms(queries: int) -> None:
    size, runs = 10, 40_000
    rng = np.random.default_rng(3)
    g = rng.normal(size=size)
    z = rng.normal(size=(runs * queries, size))
    estimates = means_of_runs(z, z @ g, queries)
    assert cosines_squared(estimates, g).mean() == pytest.approx(alignment(queries, size), rel=0.02)
    variance = ((estimates - g) ** 2).sum(1).mean() / (g @ g)
    assert variance == pytest.approx(direction_variance("gaussian", queries, size), rel=0.03)
    other = rng.normal(size=size)
    share = float((g @ other) ** 2 / ((g @ g) * (other @ other)))
    expected = alignment_with_mean(queries, size, share)
    assert cosines_squared(estimates, other).mean() == pytest.approx(expected, rel=0.03)


def test_rademacher_variance_is_exact() -> None:
    g = np.array([0.5, -2.0, 1.0, 3.0])
    z = np.array(list(itertools.product((-1.0, 1.0), repeat=4)))  # every direction there is
    estimates = means_of_runs(z, z @ g, 1)
    assert ((estimates - g) ** 2).sum(1).mean() / (g @ g) == pytest.approx(direction_variance("rademacher", 1, 4))


def test_batch_variance_is_that_of_a_mean_of_examples() -> None:
    pairs = [POPULATION[list(drawn)].mean(0) for drawn in itertools.product(range(4), repeat=2)]
    expected = np.mean([((pair - MEAN) ** 2).sum() for pair in pairs]) / (MEAN @ MEAN)
    assert batch_variance(EXACT, 2) == pytest.approx(expected)


def test_descent_is_that_of_the_best_learning_rate_on_a_quadratic() -> None:
    rng = np.random.default_rng(4)
    queries, examples, runs = 2, 2, 200_000
    batches = POPULATION[rng.integers(0, 4, (runs, examples))].mean(1)
    z = rng.normal(size=(runs, queries, 3))
    u = (z * (z @ batches[:, :, None])).mean(1)
    slope, bend = (u @ MEAN).mean(), np.einsum("ni,ij,nj->n", u, SECOND, u).mean()
    assert descent(EXACT, queries, examples) == pytest.approx(slope**2 / (2 * bend), rel=0.03)


def test_a_rounded_base_computes_as_the_compilers_quantization(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", intermediate_size=64)  # int4 takes whole groups of 32
    shape = inspect_base(str(base.directory))
    layer = base.model.model.layers[0]
    x = torch.randn(2, 5, layer.mlp.up_proj.in_features, generator=torch.Generator().manual_seed(0))
    exact = layer.mlp.up_proj(x)
    for precision in ("int8", "int8-weight", "int4"):
        scheme = target_scheme(precision, "up_proj")
        assert scheme is not None
        expected = linear(x, *quantize(layer.mlp.up_proj.weight, scheme), layer.mlp.up_proj.bias, scheme)
        with rounded(base.model, shape, precision):
            torch.testing.assert_close(layer.mlp.up_proj(x), expected)
            assert not torch.equal(layer.mlp.up_proj(x), exact)
        assert torch.equal(layer.mlp.up_proj(x), exact)


def test_every_table_is_measured(tmp_path: Path) -> None:
    rng = random.Random(0)
    for name in ("own", "proxy"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            lines = [
                json.dumps({"text": " ".join(rng.sample(WORDS, 3)), "label": ("negative", "positive")[n % 2]})
                for n in range(40)
            ]
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(lines))
    sets = [DataSet(name, tmp_path / name, TASK) for name in ("own", "proxy")]
    rows, claims = measure(str(write_base(tmp_path / "base")), (sets[0], sets[1]), Effort(32, 16, 16))
    named = {row["table"] for row in rows}
    assert named == {"choices-own", "choices-proxy", "targets", "losses", "queries", "precisions"}
    # By their definition, and of no other choice.
    assert claims["energy_of_best_own_gradients_r16"] == pytest.approx(1, abs=1e-4)
    assert claims["energy_of_best_random_r16"] < 0.9
    assert claims["slope_correlation_fp32"] > 0.95
