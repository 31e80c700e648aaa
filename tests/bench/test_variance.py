"""`bench variance`: gradients agree with finite differences, moments and closed forms with NumPy."""

import itertools
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.zo.encoding import pack_step
from shared.zo.lora import init_a, lora_modules

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")
    from bench.programs import tokenizer_of
    from bench.tiny import write_base
    from bench.variance import (
        GradientModel,
        Moments,
        alignment,
        captured_energy,
        direction_variance,
        estimate_errors,
        fixed_examples,
        measure,
        most_captured_energy,
    )
    from server.compiler import inspect_base
    from shared.recipe import BaseRef, Recipe
    from tests.device_agent.conftest import TASK, WORDS

pytestmark = pytest.mark.filterwarnings("ignore:::executorch", "ignore:::torch", "ignore:::copyreg")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    rng, root = random.Random(0), tmp_path_factory.mktemp("data")
    for name in ("own", "proxy"):
        (root / name).mkdir()
        for split in ("train", "test"):
            texts = [" ".join(rng.sample(WORDS, 3)) for _ in range(40)]
            records = [{"text": text, "label": ("negative", "positive")[n % 2]} for n, text in enumerate(texts)]
            (root / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return root / "own", root / "proxy"


def test_gradients_by_b_and_by_the_weights_are_of_the_same_loss(
    base: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    shape, tokenizer = inspect_base(str(base)), tokenizer_of(str(base), tmp_path)
    settings = {"sequence_length": 40, "answer_length": 6, "choices": 2, "rank": 4, "loss": "candidates"}
    recipe = Recipe(base=BaseRef(name="tiny", sha256=shape.sha256), effective_batch=16, **settings)
    model = GradientModel(str(base), recipe, shape)
    examples = fixed_examples(data[0] / "train.jsonl", TASK, tokenizer, recipe, 32)
    # Every batch of these examples has as many answer tokens as another, so means of means are means.
    gradients = model.weight_gradients(examples)
    projected = [(init_a(recipe, m) * recipe.scale).T @ gradients[m.name].numpy() for m in lora_modules(recipe, shape)]
    expected = np.mean([model.gradient(examples[first : first + 16]).numpy() for first in (0, 16)], axis=0)
    np.testing.assert_allclose(np.concatenate([part.ravel() for part in projected]), expected, rtol=1e-3, atol=1e-6)
    # And each is the slope of the loss along a direction.
    adapted, batch = model.adapted(16, "candidates"), pack_step(examples[:16], recipe, dynamic=True)
    z = torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], adapted.size).astype(np.float32)) * 1e-3
    with torch.no_grad():
        plus, minus = adapted.losses(batch, torch.stack((z, -z))).double().tolist()
    adapted.remove()
    assert float(model.gradient(examples[:16]) @ z.double()) == pytest.approx((plus - minus) / 2, rel=1e-2)
    example_gradients = [model.gradient([example]).numpy() for example in examples]
    moments = model.moments(examples, "candidates")
    halves = np.mean(example_gradients[::2], axis=0), np.mean(example_gradients[1::2], axis=0)
    assert moments.signal == pytest.approx(halves[0] @ halves[1])
    assert moments.total == pytest.approx(np.mean([gradient @ gradient for gradient in example_gradients]))


def test_the_squared_gradient_of_a_batch_is_unbiased() -> None:
    population = np.array([[1.0, 2.0, 0.0], [0.5, -1.0, 2.0], [3.0, 1.0, 1.0], [0.0, 0.5, -0.25]])
    mean = torch.from_numpy(population.mean(0))
    exact = Moments((mean, mean), float((population**2).sum(1).mean()))
    pairs = [population[list(indices)].mean(0) for indices in itertools.product(range(4), repeat=2)]
    assert exact.squared(2) == pytest.approx(np.mean([pair @ pair for pair in pairs]))


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_singular_vectors_capture_the_most(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    g = rng.normal(size=shape)
    gradient, columns = torch.from_numpy(g), np.linalg.svd(g)[0]
    for rank in (1, 3, 5):
        assert captured_energy(columns[:, :rank], gradient) == pytest.approx(most_captured_energy(gradient, rank))
    # A random A lets 1 / in of everything through, on average.
    energies = [captured_energy(rng.normal(size=(shape[0], 5)), gradient) for _ in range(400)]
    assert np.mean(energies) == pytest.approx((g**2).sum() / shape[0], rel=0.1)


@pytest.mark.parametrize("queries", [1, 3])
def test_gaussian_alignment_and_variance_are_as_in_the_closed_forms(queries: int) -> None:
    size, rng = 10, np.random.default_rng(3)
    cosines, spreads = zip(
        *estimate_errors(rng.normal(size=(40_000 * queries, size)), rng.normal(size=size), queries), strict=True
    )
    assert np.mean(cosines) == pytest.approx(alignment(queries, size), rel=0.02)
    assert np.mean(spreads) == pytest.approx(direction_variance("gaussian", queries, size), rel=0.03)


def test_rademacher_variance_is_exact() -> None:
    z = np.array(list(itertools.product((-1.0, 1.0), repeat=4)))  # every direction there is
    spreads = [spread for _, spread in estimate_errors(z, np.array([0.5, -2.0, 1.0, 3.0]), 1)]
    assert np.mean(spreads) == pytest.approx(direction_variance("rademacher", 1, 4))


def test_every_table_is_measured(base: Path, data: tuple[Path, Path]) -> None:
    rows, claims = measure(str(base), data, TASK, (32, 16, 16))
    assert {row["table"] for row in rows} == {"choices", "losses", "queries"}
    assert claims["energy_of_best_random_r16"] < claims["energy_of_best_proxy_gradients_r16"] <= 1 + 1e-6
    assert {"curvature_over_second_moment", "predicted_steps_full_loss"} & set(claims)
