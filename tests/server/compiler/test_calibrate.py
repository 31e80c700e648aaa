"""Calibrations against the stock model's own gradients and inputs, one example at a time, and NumPy's SVD."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from server.compiler.calibrate import calibrate
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import TARGETS
from shared.zo.calibration import load_calibration
from shared.zo.encoding import Example, Row
from shared.zo.lora import BaseShape, lora_modules
from tests.server.compiler.conftest import VOCABULARY

BATCH = 4
# Layers of other names, inputs and norms; a soft cap on the logits; chosen layers, with the lowest not among them.
CASES = {
    "llama": {"targets": TARGETS},
    "opt": {"targets": ("q_proj", "o_proj", "up_proj", "down_proj"), "layers": (1, 2)},
    "gemma3_text": {"targets": ("v_proj", "down_proj"), "layers": "last:1"},
}


def made_up(count, answers):
    """Random examples of changing length with `answers` tokens to an answer."""
    rng = np.random.default_rng(3)

    def tokens(size):
        return tuple(rng.integers(3, VOCABULARY, size).tolist())

    examples = []
    for number in range(count):
        prompt = tokens(int(rng.integers(2, 9)))
        rows = (Row(prompt, tokens(answers)), Row(prompt, tokens(answers)))
        examples.append(Example(rows, number % 2, False))
    return examples


def batches(examples):
    return [examples[at : at + BATCH] for at in range(0, len(examples), BATCH)]


def leading(matrix, width, like):
    """The first right singular vectors (in, width), with the signs of `like`."""
    vectors = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)[2][:width].T
    return vectors * np.sign((vectors * like).sum(0))


def loss_of(model, batch, loss):
    """Mean negative log-likelihood over all answer tokens of a batch, from the model's own logits, unpadded."""
    terms = []
    for example in batch:
        right, wrong = example.correct_row, example.rows[1 - example.correct]
        logits = model(torch.tensor([right.prompt + right.answer])).logits[0]
        for at, token in enumerate(right.answer):
            position_logits = logits[len(right.prompt) - 1 + at]
            if loss == "candidates":
                token_ids = [token, wrong.answer[at]] if at == 0 else [token]  # they part at the first token
                position_logits, token = position_logits[token_ids], 0
            terms.append(-torch.log_softmax(position_logits, -1)[token])
    return torch.stack(terms).mean()


def expected_gradients(model, name, examples, loss):
    """The gradients of all batches by one weight, stacked (batches out, in)."""
    weight = model.get_submodule(name).weight.requires_grad_()
    gradients = [torch.autograd.grad(loss_of(model, batch, loss), weight)[0].numpy() for batch in batches(examples)]
    weight.requires_grad_(False)
    return np.concatenate(gradients)


@torch.no_grad()
def expected_inputs(model, name, examples):
    """What one layer reads, token by token (tokens, in)."""
    layer_inputs = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(
        lambda _, inputs: layer_inputs.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
    )
    for example in examples:
        model(torch.tensor([example.correct_row.tokens]))
    handle.remove()
    return np.concatenate(layer_inputs)


def stock_model(base, name):
    """Returns transformers' model of the base, frozen, with the soft cap on attention that programs compute."""
    model = AutoModelForCausalLM.from_pretrained(base.directory).eval().requires_grad_(False)
    if name == "gemma3_text":
        model.set_attn_implementation("softcapped")
    return model


def recipe_of(base, **settings):
    return base.recipe(rank=3, effective_batch=BATCH, choices=2, **settings)


def check(calibration, recipe, shape, expected):
    assert calibration.directions.keys() == {module.name for module in lora_modules(recipe, shape)}
    for name, directions in calibration.directions.items():
        np.testing.assert_allclose(directions, leading(expected[name], 3, directions), atol=2e-3)
        largest = directions[np.abs(directions).argmax(0), np.arange(3)]
        assert (largest > 0).all()


@pytest.mark.parametrize(
    ("name", "loss", "answers"),
    [
        ("llama", "candidates", 1),
        ("gemma3_text", "full", 2),
        pytest.param("opt", "candidates", 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_leading_directions(architectures, name, loss, answers):
    base, examples = architectures.base(name), made_up(10, answers)  # the last batch is short
    recipe = recipe_of(base, loss=loss, answer_length=answers, **CASES[name])
    progress = []
    calibration = load_calibration(
        calibrate(str(base.directory), recipe, "gradients", "own", examples, lambda *report: progress.append(report))
    )
    model = stock_model(base, name)
    shape = shape_of(base)
    names = [module.name for module in lora_modules(recipe, shape)]
    check(calibration, recipe, shape, {name: expected_gradients(model, name, examples, loss) for name in names})
    metadata = calibration.metadata
    assert (metadata.base, metadata.kind, metadata.task, metadata.examples) == (recipe.base, "gradients", "own", 10)
    assert {stage for stage, _ in progress} == {"read", "examples", "directions"}
    assert all(0 <= fraction <= 1 for _, fraction in progress)


def test_a_balanced_calibration_makes_gradients_equally_large(architectures):
    base, examples = architectures.base("llama"), made_up(10, 1)
    recipe = recipe_of(base, loss="candidates", answer_length=1, **CASES["llama"])
    given = str(base.directory), recipe, "gradients", "own", examples
    plain = load_calibration(calibrate(*given))
    balanced = load_calibration(calibrate(*given, balance=True))
    model = stock_model(base, "llama")

    def energies(calibration):
        """The squares of B's gradients, by module, summed over batches."""
        return np.array(
            [
                np.square(expected_gradients(model, name, examples, "candidates") @ calibration.a(name, 3)).sum()
                for name in calibration.directions
            ]
        )

    before = energies(plain)
    assert before.max() > 10 * before.min()
    np.testing.assert_allclose(energies(balanced), before.mean(), rtol=1e-3)
    for name, directions in plain.directions.items():
        np.testing.assert_array_equal(balanced.directions[name], directions)


@pytest.mark.parametrize("name", ["opt", "gemma3_text"])
def test_inputs_leading_directions(architectures, name):
    base, examples = architectures.base(name), made_up(6, 2)
    recipe = recipe_of(base, **CASES[name])
    calibration = load_calibration(calibrate(str(base.directory), recipe, "activations", "own", examples))
    model = stock_model(base, name)
    shape = shape_of(base)
    names = [module.name for module in lora_modules(recipe, shape)]
    check(calibration, recipe, shape, {name: expected_inputs(model, name, examples) for name in names})
    assert calibration.metadata.kind == "activations"


def shape_of(base):
    facts = inspect_base(str(base.directory))
    return BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})


def test_the_same_examples_give_the_same_bytes(architectures):
    base, examples = architectures.base("llama"), made_up(8, 2)
    recipe = recipe_of(base)
    first = calibrate(str(base.directory), recipe, "gradients", "own", examples)
    assert calibrate(str(base.directory), recipe, "gradients", "own", examples) == first
