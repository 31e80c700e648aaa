"""Steps that perturb the answer's positions alone, against the stock model with a B for each position."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import TARGETS
from shared.zo.lora import init_a, lora_modules
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.checks import check_scores, check_split
from tests.server.compiler.conftest import COMPILED, VOCABULARY

LR, EPS, STEPS = 0.05, 0.02, 3
SETTINGS = {"perturbed": "answers", "estimator": "replay", "queries": 3}


def answers_in_a_row(rng, recipe):
    """A random batch whose answers are consecutive tokens, as those of examples are."""
    batch = reference.random_batch(rng, recipe, VOCABULARY)
    starts = rng.integers(0, recipe.sequence_length - recipe.answer_length, (recipe.effective_batch, 1))
    return replace(batch, positions=(starts + np.arange(recipe.answer_length)).astype(TOKEN_DTYPE))


@torch.no_grad()
def loss(model, recipe, shape, current, path, batch):
    """The loss of transformers' model with B `path` at the answers' positions and `current` at all others."""
    rows, positions = np.nonzero(batch.mask)[0], batch.positions[np.nonzero(batch.mask)]
    answers = torch.zeros(*batch.tokens.shape, 1, dtype=torch.bool)
    answers[rows, positions.astype(np.int64)] = True
    handles = []
    for module in lora_modules(recipe, shape):
        a, part = torch.from_numpy(init_a(recipe, module)), slice(module.offset, module.offset + module.size)
        b, b_path = (torch.from_numpy(flat[part]).view(module.rank, -1) for flat in (current, path))

        def added(x, a=a, b=b, b_path=b_path):
            low = (recipe.alpha / recipe.rank) * (x @ a)
            return torch.where(answers, low @ b_path, low @ b)

        handles.append(reference.adapt(model, shape, module, added))
    try:
        logits = model(torch.from_numpy(batch.tokens.astype(np.int64))).logits
    finally:
        for handle in handles:
            handle.remove()
    picked = logits[torch.arange(len(logits))[:, None], torch.from_numpy(batch.positions.astype(np.int64))]
    return float(reference.mean_loss(picked, recipe, batch))


def check_answer_steps(program, model, lr=LR):
    """Losses are those of paths that differ at the answers' positions; B moves by their differences from the mean."""
    manifest, rng = program.manifest, np.random.default_rng(7)
    recipe, flat = manifest.recipe, program.load_some_b()
    for number in range(STEPS):
        batch, seeds = answers_in_a_row(rng, recipe), query_seeds(123, number, recipe.queries)
        z = np.stack([direction(recipe.noise, (int(a), int(b)), manifest.size) for a, b in seeds])
        losses, coefficients = program.step(batch, seeds, lr, EPS)
        paths = [flat + np.float32(EPS) * each for each in z]
        expected = [loss(model, recipe, manifest.shape, flat, path, batch) for path in paths]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert np.ptp(losses) > 1e-4
        for coefficient, each in zip(coefficients, z, strict=True):
            flat = flat - coefficient * each
        np.testing.assert_array_equal(program("adapter")[0], flat)
        slopes = (losses - losses.mean()) / np.float32(EPS)
        rate = np.float32(lr / recipe.queries)
        last_bit = np.spacing(losses.mean()) / EPS  # the mean, which all slopes share, is rounded to float32
        np.testing.assert_allclose(coefficients, slopes * rate, rtol=1e-4, atol=2 * last_bit * rate)


@pytest.mark.parametrize("name", COMPILED)
def test_every_architecture(architectures, programs, name):
    base = architectures.base(name)
    check_answer_steps(programs(base, targets=TARGETS[:4], **SETTINGS), base.model)


@pytest.fixture
def losses_programs(programs, tiny_tied):
    """Programs by loss: of three directions, and of hundreds of paths, as the candidates' loss is cheap."""
    settings = {"layers": "last:1", "targets": TARGETS} | SETTINGS
    return lambda loss: programs(tiny_tied, loss=loss, **settings | {"queries": 3 if loss == "full" else 100})


@pytest.mark.parametrize("loss_over", ["full", "candidates"])
def test_losses_scores_and_the_split_step(losses_programs, tiny_tied, loss_over):
    program = losses_programs(loss_over)
    check_answer_steps(program, tiny_tied.model)
    check_scores(program, tiny_tied.model, (12, 5, 2))
    rng, recipe = np.random.default_rng(7), program.manifest.recipe
    batches = [answers_in_a_row(rng, recipe) for _ in range(STEPS)]
    check_split(program, batches, [(query_seeds(5, number, recipe.queries), LR, EPS) for number in range(STEPS)])


def test_hundreds_of_directions_replay_bit_for_bit(losses_programs):
    program = losses_programs("candidates")
    recipe, rng = program.manifest.recipe, np.random.default_rng(1)
    seeds = query_seeds(5, 0, recipe.queries)
    _, coefficients = program.step(answers_in_a_row(rng, recipe), seeds, LR, EPS)
    (trained,) = program("adapter")
    program("load", np.zeros(program.manifest.size, np.float32))
    program("replay", seeds, coefficients)
    np.testing.assert_array_equal(program("adapter")[0], trained)
