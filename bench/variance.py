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
from bench.result import Claims, Measured, Row, notes, write
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
QUICK, PLAIN = (64, 256, 16), (256, 512, 64)  # examples of a split, directions for q, and for the curvature


def variance(json_file: JsonFile = None, quick: QuickOption = False) -> None:
    """Variance and alignment of gradient estimates by q, noise and loss; what each choice of A keeps; curvature."""
    found = measure(str(model_file()), (MOVIES, PRODUCTS), named_task("sst2"), QUICK if quick else PLAIN)
    write(json_file, *found)


def measure(base: str, data: tuple[Path, Path], task: Task, effort: tuple[int, int, int], length: int = 64) -> Measured:
    """Returns all tables and claims. data: directories of the user's data set, and of the proxy. effort: as QUICK."""
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
        return some_examples(directory / f"{split}.jsonl", task, tokenizer, recipe, count)

    bench, tested = Bench(base, recipe, facts), examples(data[0], "test")
    rows, claims = choices_of_a(bench, examples(data[0], "train"), examples(data[1], "train"))
    notes.print("gradients of single examples, by loss")
    moments = {loss: bench.moments(tested, loss) for loss in get_args(Loss)}
    notes.print("directions and curvature")
    for found in (losses(moments), queries(bench, tested, directions)):
        rows, claims = rows + found[0], claims | found[1]
    curvature = bench.curvature(tested[:BATCH], differences)
    return rows, claims | {"curvature_over_second_moment": curvature / moments["candidates"].total}


def some_examples(path: Path, task: Task, tokenizer: Tokenizer, recipe: Recipe, count: int) -> list[Example]:
    """Returns at most `count` examples, in whole batches, the same ones every time."""
    found = load_examples(path, task, tokenizer, recipe)
    whole = min(count, len(found)) // BATCH * BATCH
    if not whole:
        raise SystemExit(f"{path} holds fewer than {BATCH} examples")
    return [found[at] for at in permutation(0, 0, len(found))[:whole]]


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
        """Returns |E g_e|^2, unbiased: negative if too few examples were seen to tell the gradient from noise."""
        return self.product(self)

    def squared(self, examples: int) -> float:
        """Returns E |g_E|^2 of a batch."""
        return self.signal + (self.total - self.signal) / examples


class Bench:
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
        (found,) = torch.autograd.grad(adapted.losses(batch, b.unsqueeze(0)).sum(), b)
        adapted.remove()
        return found.double()

    def moments(self, examples: Sequence[Example], loss: Loss) -> Moments:
        """Returns the moments over an even number of examples."""
        sums, total = [0, 0], 0.0
        for number, example in enumerate(examples):
            one = self.gradient([example], loss)
            sums[number % 2] = sums[number % 2] + one
            total += float(one @ one)
        first, second = (each / (len(examples) // 2) for each in sums)
        return Moments((first, second), total / len(examples))

    def weight_gradients(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Returns dL/dW of the mean loss for every linear layer that the recipe adapts: by name, float64 (in, out)."""
        adapted, layers = self.adapted(BATCH, "candidates"), dict(self.model.named_modules())
        weights = {m.name: layers[m.name].weight.requires_grad_() for m in lora_modules(self.recipe, self.shape)}
        for at in range(0, len(examples), BATCH):
            batch = pack_step(examples[at : at + BATCH], self.recipe, dynamic=True)
            (adapted.losses(batch, adapted.zeros().unsqueeze(0)).sum() * BATCH / len(examples)).backward()
        adapted.remove()
        found = {name: weight.grad.T.double() for name, weight in weights.items()}
        for weight in weights.values():
            weight.requires_grad_(False).grad = None
        return found

    @torch.no_grad()
    def curvature(self, examples: Sequence[Example], count: int) -> float:
        """Returns the mean of z^T H z over `count` Rademacher directions, which estimates tr H of a batch's loss."""
        adapted, eps, bends = self.adapted(len(examples), "candidates"), DEFAULT_EPS["fp32"], []
        batch = pack_step(examples, adapted.recipe, dynamic=True)
        middle = float(adapted.losses(batch, adapted.zeros().unsqueeze(0))[0])
        for number in range(count // PATHS):
            steps = torch.from_numpy(drawn("rademacher", 13, number, PATHS, adapted.size)) * eps
            plus, minus = adapted.losses(batch, torch.cat((steps, -steps))).double().reshape(2, PATHS)
            bends.append(float((plus + minus - 2 * middle).mean()) / eps**2)
        adapted.remove()
        return float(np.mean(bends))

    def adapted(self, examples: int, loss: Loss) -> AdaptedModel:
        """Returns the model with the recipe's LoRA, for batches of so many examples; `remove` takes it off."""
        recipe = self.recipe.model_copy(update={"loss": loss, "effective_batch": examples})
        return AdaptedModel(self.model, recipe, self.shape)


def drawn(noise: str, seed: int, number: int, count: int, size: int) -> np.ndarray:
    """Returns directions z: float32 (count, D)."""
    return np.stack([direction(noise, (int(a), int(b)), size) for a, b in query_seeds(seed, number, count)])


def choices_of_a(bench: Bench, own: list[Example], proxy: list[Example]) -> Measured:
    """Compares the choices of A. own, proxy: training examples of the user's data set, and of the other one."""
    modules, recipe = lora_modules(bench.recipe, bench.shape), bench.recipe
    found = {"random": {module.name: init_a(recipe, module) for module in modules}}
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        notes.print(f"A from proxy {kind}")
        file = calibrate(bench.base, recipe, kind, "task", proxy)
        found[f"proxy {kind}"] = dict(load_calibration(file).directions)
    gradients = bench.weight_gradients(own)
    rows: list[Row] = []
    for rank in RANKS:
        most = sum(most_captured(gradient, rank) for gradient in gradients.values())
        for name, columns in found.items():
            kept = sum(captured(columns[layer][:, :rank], gradient) for layer, gradient in gradients.items())
            rows.append({"table": "choices", "rank": rank, "a": name, "energy_of_best": kept / most})
    return rows, {f"energy_of_best_{row['a'].replace(' ', '_')}_r{row['rank']}": row["energy_of_best"] for row in rows}


def captured(columns: np.ndarray, gradient: Tensor) -> float:
    """Returns |A^T G|^2 at |A|_F = 1: columns of A (in, r), G = dL/dW (in, out)."""
    a = torch.from_numpy(columns).to(gradient)
    return float(((a.T @ gradient) ** 2).sum() / (a**2).sum())


def most_captured(gradient: Tensor, rank: int) -> float:
    """Returns the most that r orthogonal columns of equal length capture: the mean of the r largest s^2 of G."""
    return float((torch.linalg.svdvals(gradient)[:rank] ** 2).mean())


def losses(moments: Mapping[str, Moments]) -> Measured:
    """Compares the loss over the candidates with the paper's, over the vocabulary, for the same random A of rank 16."""
    rows, claims, aim = [], Claims(), moments["candidates"]
    for loss, one in moments.items():
        product, known = one.product(aim), one.signal > 0 and aim.signal > 0
        cosine = product / float(np.sqrt(one.signal * aim.signal)) if known else None
        steps = (aim.signal**2 / aim.squared(EXAMPLES)) / (product**2 / one.squared(EXAMPLES))
        row = {"table": "losses", "loss": loss, "gradient_squared": one.signal, "second_moment": one.total}
        rows.append(row | {"cosine_with_candidates": cosine, "steps": steps})
        if loss == "full" and cosine is not None:
            claims = {"cosine_full_with_candidates": cosine, "predicted_steps_full_loss": steps}
    return rows, claims


def queries(bench: Bench, examples: list[Example], count: int) -> Measured:
    """Compares q and the kind of noise on one batch, with `count` directions that every q shares (eps -> 0)."""
    rows, claims = [], Claims()
    gradient = bench.gradient(examples[:BATCH]).numpy()
    size, most = len(gradient), max(QUERIES)
    for noise in ("gaussian", "rademacher"):
        found: dict[int, list[tuple[float, float]]] = {q: [] for q in QUERIES}
        for run in range(count // most):
            z = drawn(noise, 11, run, most, size).astype(np.float64)
            for q in QUERIES:
                found[q] += seen(z, gradient, q)
        new: list[Row] = []
        for q, pairs in found.items():
            cosine, spread = np.mean(pairs, axis=0)
            theory = {"alignment_theory": alignment(q, size), "variance_theory": direction_variance(noise, q, size)}
            about = {"table": "queries", "noise": noise, "q": q}
            new.append(about | {"alignment": float(cosine), "variance": float(spread)} | theory)
        for name in ("alignment", "variance"):
            over = [row[name] / row[f"{name}_theory"] for row in new]
            claims[f"{name}_over_theory_{noise}"] = float(np.mean(over))
        rows += new
    return rows, claims


def seen(z: np.ndarray, gradient: np.ndarray, q: int) -> list[tuple[float, float]]:
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
