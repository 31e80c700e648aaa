"""`bench variance`: how well a zeroth-order step estimates the gradient, and how much of the gradient each A keeps.

SmolLM2-135M in PyTorch, where autograd gives the exact gradient to compare with. Everything is measured at B = 0,
where training starts, with the default recipe: rank 16, q_proj and v_proj of all layers, q = 4, E = 4. Tables:

- choices: of the energy of the mean gradient by the weights, on the user's training examples, what A keeps over the
  most that orthogonal columns of equal length can keep. A is random, or a calibration of the product from the other
  data set (the proxy).
- losses: the loss over the candidates against the paper's, over the vocabulary. steps: predicted steps to lower the
  candidates' loss by as much, if only the noise of directions decides the learning rate.
- queries: alignment with the gradient of a batch, and variance, over q and noise, beside their closed forms.

curvature_over_second_moment: tr H of the loss by second differences, over the trace of the second moment of examples'
gradients, which predictions use in its place.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.baselines.adapted import AdaptedModel
from bench.baselines.rounding import load_model
from bench.programs import MOVIES, PRODUCTS, model_file, tokenizer_of
from bench.result import Claims, Measurement, Row, notes, write
from bench.runner import JsonFile
from bench.runner import Quick as QuickOption
from server.compiler.calibrate import calibrate
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import DEFAULT_EPS, BaseRef, Loss, Recipe
from shared.task import Task
from shared.task_templates import named_task
from shared.zo.calibration import Kind, load_calibration
from shared.zo.encoding import Example, answer_sizes, load_examples, pack_step
from shared.zo.lora import BaseShape, init_a, lora_modules
from shared.zo.noise import direction, permutation, query_seeds

BATCH, EXAMPLES = 16, 4  # examples of a packed batch, and of a step of the default recipe
RANKS, QUERIES = (16, 4, 1), (1, 2, 4, 8, 16)
PATHS = 4  # directions whose two copies of B run at once
# Examples of a split, directions for q, directions for the curvature.
QUICK_EFFORT, PLAIN_EFFORT = (64, 256, 16), (256, 512, 64)


def variance(json_file: JsonFile = None, quick: QuickOption = False) -> None:
    """Variance and alignment of gradient estimates by q, noise and loss; what each choice of A keeps; curvature."""
    measurement = measure(
        str(model_file()), (MOVIES, PRODUCTS), named_task("sst2"), QUICK_EFFORT if quick else PLAIN_EFFORT
    )
    write(json_file, *measurement)


def measure(
    base: str, data: tuple[Path, Path], task: Task, effort: tuple[int, int, int], length: int = 64
) -> Measurement:
    """Returns all tables and claims. data: the user's data set, and the proxy. effort: as QUICK_EFFORT."""
    count, directions, differences = effort
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tokenizer_of(base, Path(name))
    facts, (answer, choices) = inspect_base(base), answer_sizes(task, tokenizer)
    recipe = Recipe(
        base=BaseRef(name=Path(base).stem, sha256=facts.sha256),
        effective_batch=BATCH,
        sequence_length=length,
        answer_length=answer,
        choices=choices,
        loss="candidates",
    )

    def examples(directory: Path, split: str) -> list[Example]:
        return fixed_examples(directory / f"{split}.jsonl", task, tokenizer, recipe, count)

    model, test_examples = GradientModel(base, recipe, facts), examples(data[0], "test")
    rows, claims = choices_of_a(model, examples(data[0], "train"), examples(data[1], "train"))
    notes.print("gradients of single examples, by loss")
    moments = {loss: model.moments(test_examples, loss) for loss in get_args(Loss)}
    notes.print("directions and curvature")
    for part in (losses(moments), queries(model, test_examples, directions)):
        rows, claims = rows + part[0], claims | part[1]
    curvature = model.curvature(test_examples[:BATCH], differences)
    return rows, claims | {"curvature_over_second_moment": curvature / moments["candidates"].total}


def fixed_examples(path: Path, task: Task, tokenizer: Tokenizer, recipe: Recipe, count: int) -> list[Example]:
    """Returns at most `count` examples, in whole batches, the same ones every time."""
    examples = load_examples(path, task, tokenizer, recipe)
    usable = min(count, len(examples)) // BATCH * BATCH
    if not usable:
        raise SystemExit(f"{path} holds fewer than {BATCH} examples")
    return [examples[index] for index in permutation(0, 0, len(examples))[:usable]]


@dataclass(frozen=True)
class Moments:
    """Moments of B's gradient g_e of one example.

    halves: mean gradients (D,) of two independent halves of the examples. total: E |g_e|^2, the trace of the second
    moment.
    """

    halves: tuple[Tensor, Tensor]
    total: float

    def product(self, other: "Moments") -> float:
        """Returns the unbiased inner product of the mean gradient with that of another loss on the same examples."""
        (a, b), (c, d) = self.halves, other.halves
        return float(a @ d + b @ c) / 2

    @property
    def signal(self) -> float:
        """Returns |E g_e|^2, unbiased: negative if there are too few examples to tell the gradient from noise."""
        return self.product(self)

    def squared(self, examples: int) -> float:
        """Returns E |g_E|^2 of a batch."""
        return self.signal + (self.total - self.signal) / examples


class GradientModel:
    """A model in PyTorch, and its gradients."""

    def __init__(self, base: str, recipe: Recipe, shape: BaseShape) -> None:
        notes.print("opening the model")
        self.base, self.recipe, self.shape = base, recipe, shape
        self.model: Any = load_model(base, "cpu", "float32")

    def gradient(self, examples: Sequence[Example], loss: Loss = "candidates") -> Tensor:
        """Returns the gradient of the mean loss of some examples with respect to B: float64 (D,)."""
        adapted = self.adapted(len(examples), loss)
        b = adapted.zeros().requires_grad_()
        batch = pack_step(examples, adapted.recipe, dynamic=True)
        (gradient,) = torch.autograd.grad(adapted.losses(batch, b.unsqueeze(0)).sum(), b)
        adapted.remove()
        return gradient.double()

    def moments(self, examples: Sequence[Example], loss: Loss) -> Moments:
        """Returns the moments over an even number of examples."""
        sums, total = [0, 0], 0.0
        for number, example in enumerate(examples):
            gradient = self.gradient([example], loss)
            sums[number % 2] = sums[number % 2] + gradient
            total += float(gradient @ gradient)
        first, second = (each / (len(examples) // 2) for each in sums)
        return Moments((first, second), total / len(examples))

    def weight_gradients(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Returns dL/dW of the mean loss for every linear layer that the recipe adapts: by name, float64 (in, out)."""
        adapted, layers = self.adapted(BATCH, "candidates"), dict(self.model.named_modules())
        weights = {m.name: layers[m.name].weight.requires_grad_() for m in lora_modules(self.recipe, self.shape)}
        for first in range(0, len(examples), BATCH):
            batch = pack_step(examples[first : first + BATCH], self.recipe, dynamic=True)
            (adapted.losses(batch, adapted.zeros().unsqueeze(0)).sum() * BATCH / len(examples)).backward()
        adapted.remove()
        gradients = {name: weight.grad.T.double() for name, weight in weights.items()}
        for weight in weights.values():
            weight.requires_grad_(False).grad = None
        return gradients

    @torch.no_grad()
    def curvature(self, examples: Sequence[Example], count: int) -> float:
        """Returns the mean of z^T H z over `count` Rademacher directions, which estimates tr H of a batch's loss."""
        adapted, eps, second_differences = self.adapted(len(examples), "candidates"), DEFAULT_EPS["fp32"], []
        batch = pack_step(examples, adapted.recipe, dynamic=True)
        center = float(adapted.losses(batch, adapted.zeros().unsqueeze(0))[0])
        for number in range(count // PATHS):
            steps = torch.from_numpy(draw_directions("rademacher", 13, number, PATHS, adapted.size)) * eps
            plus, minus = adapted.losses(batch, torch.cat((steps, -steps))).double().reshape(2, PATHS)
            second_differences.append(float((plus + minus - 2 * center).mean()) / eps**2)
        adapted.remove()
        return float(np.mean(second_differences))

    def adapted(self, examples: int, loss: Loss) -> AdaptedModel:
        """Returns the model with the recipe's LoRA, for batches of `examples` examples; `remove` removes the LoRA."""
        recipe = self.recipe.model_copy(update={"loss": loss, "effective_batch": examples})
        return AdaptedModel(self.model, recipe, self.shape)


def draw_directions(noise: str, seed: int, number: int, count: int, size: int) -> np.ndarray:
    """Returns directions z: float32 (count, D)."""
    return np.stack([direction(noise, (int(a), int(b)), size) for a, b in query_seeds(seed, number, count)])


def choices_of_a(model: GradientModel, user_examples: list[Example], proxy_examples: list[Example]) -> Measurement:
    """Compares the choices of A. The training examples are of the user's data set, and of the other one."""
    modules, recipe = lora_modules(model.recipe, model.shape), model.recipe
    directions = {"random": {module.name: init_a(recipe, module) for module in modules}}
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        notes.print(f"A from proxy {kind}")
        file = calibrate(model.base, recipe, kind, "task", proxy_examples)
        directions[f"proxy {kind}"] = dict(load_calibration(file).directions)
    gradients = model.weight_gradients(user_examples)
    rows: list[Row] = []
    for rank in RANKS:
        most_energy = sum(most_captured_energy(gradient, rank) for gradient in gradients.values())
        for name, columns in directions.items():
            energy = sum(captured_energy(columns[layer][:, :rank], gradient) for layer, gradient in gradients.items())
            rows.append({"table": "choices", "rank": rank, "a": name, "energy_of_best": energy / most_energy})
    return rows, {f"energy_of_best_{row['a'].replace(' ', '_')}_r{row['rank']}": row["energy_of_best"] for row in rows}


def captured_energy(columns: np.ndarray, gradient: Tensor) -> float:
    """Returns |A^T G|^2 at |A|_F = 1: columns of A (in, r), G = dL/dW (in, out)."""
    a = torch.from_numpy(columns).to(gradient)
    return float(((a.T @ gradient) ** 2).sum() / (a**2).sum())


def most_captured_energy(gradient: Tensor, rank: int) -> float:
    """Returns the most that r orthogonal columns of equal length capture: the mean of the r largest s^2 of G."""
    return float((torch.linalg.svdvals(gradient)[:rank] ** 2).mean())


def losses(moments: Mapping[str, Moments]) -> Measurement:
    """Compares the loss over the candidates with the paper's, over the vocabulary, for the same random A of rank 16."""
    rows, claims, reference = [], Claims(), moments["candidates"]
    for loss, loss_moments in moments.items():
        product, comparable = loss_moments.product(reference), loss_moments.signal > 0 and reference.signal > 0
        cosine = product / float(np.sqrt(loss_moments.signal * reference.signal)) if comparable else None
        steps = (reference.signal**2 / reference.squared(EXAMPLES)) / (product**2 / loss_moments.squared(EXAMPLES))
        row = {
            "table": "losses",
            "loss": loss,
            "gradient_squared": loss_moments.signal,
            "second_moment": loss_moments.total,
        }
        rows.append(row | {"cosine_with_candidates": cosine, "steps": steps})
        if loss == "full" and cosine is not None:
            claims = {"cosine_full_with_candidates": cosine, "predicted_steps_full_loss": steps}
    return rows, claims


def queries(model: GradientModel, examples: list[Example], count: int) -> Measurement:
    """Compares q and the kind of noise on one batch, with `count` directions that every q shares (eps -> 0)."""
    rows, claims = [], Claims()
    gradient = model.gradient(examples[:BATCH]).numpy()
    size, most_queries = len(gradient), max(QUERIES)
    for noise in ("gaussian", "rademacher"):
        errors: dict[int, list[tuple[float, float]]] = {q: [] for q in QUERIES}
        for run in range(count // most_queries):
            z = draw_directions(noise, 11, run, most_queries, size).astype(np.float64)
            for q in QUERIES:
                errors[q] += estimate_errors(z, gradient, q)
        noise_rows: list[Row] = []
        for q, pairs in errors.items():
            cosine, spread = np.mean(pairs, axis=0)
            theory = {"alignment_theory": alignment(q, size), "variance_theory": direction_variance(noise, q, size)}
            columns = {"table": "queries", "noise": noise, "q": q}
            noise_rows.append(columns | {"alignment": float(cosine), "variance": float(spread)} | theory)
        for name in ("alignment", "variance"):
            ratios = [row[name] / row[f"{name}_theory"] for row in noise_rows]
            claims[f"{name}_over_theory_{noise}"] = float(np.mean(ratios))
        rows += noise_rows
    return rows, claims


def estimate_errors(z: np.ndarray, gradient: np.ndarray, q: int) -> list[tuple[float, float]]:
    """Returns cos^2 with the gradient g (D,), and |estimate - g|^2 / |g|^2, of each estimate from q rows of z (n, D).

    The estimate is the paper's (Section 2): the mean over q directions of (g.z) z.
    """
    estimates = (z * (z @ gradient)[:, None]).reshape(len(z) // q, q, -1).mean(1)
    square = gradient @ gradient
    cosines = (estimates @ gradient) ** 2 / ((estimates**2).sum(1) * square)
    return list(zip(cosines, ((estimates - gradient) ** 2).sum(1) / square, strict=True))


def alignment(queries: int, size: int) -> float:
    """Returns E cos^2 between the estimate and g for Gaussian z: q / (D + q - 1), exact.

    The estimate is Z a, Z (D, q) the directions and a = Z^T g. Along g it is |g| times a chi-square of q degrees of
    freedom, c; across, given a, it is Gaussian of variance |a|^2 in D - 1 dimensions. So cos^2 = c / (c + c'), c' an
    independent chi-square of D - 1 degrees: Beta(q / 2, (D - 1) / 2), whose mean this is.
    """
    return queries / (size + queries - 1)


def direction_variance(noise: str, queries: int, size: int) -> float:
    """Returns E |estimate - g|^2 / |g|^2: (D + 1) / q for Gaussian z, (D - 1) / q for Rademacher z."""
    return (size + (1 if noise == "gaussian" else -1)) / queries
