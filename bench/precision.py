"""`bench precision`: what each precision costs in training, on SmolLM2-135M and movie reviews.

- slope: how well the differences of two losses in the precision's program agree with the exact directional derivatives
  of the same rounded model, over perturbation scales; 64 Rademacher directions at B = 0. Below some scale the rounding
  of activations, not the perturbation, decides a difference.
- learning: accuracy and loss on validation reviews without training and after exact-gradient steps through the rounded
  model in PyTorch, three seeds.

Neither compares gradients with those of the float32 model: a rounded model is another model, which may have other
gradients and learn as well.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from bench.baselines.adapted import AdaptedModel
from bench.baselines.rounding import load_model
from bench.programs import CompiledProgram, compile_cold, model_file, movie_reviews, smollm2_recipe, tokenizer_of
from bench.result import Claims, Measurement, Row, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, load_or_compute, select_parts
from bench.training.learners import torch_learner
from bench.training.runs import Contender, new_run, train
from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import TARGETS, Precision, RecipeSettings
from shared.training_settings import TrainingSettings
from shared.zo.encoding import pack_step
from shared.zo.noise import direction, query_seeds

SCALES, QUICK_SCALES = (1e-2, 2e-2, 5e-2, 1e-1), (1e-2, 5e-2)
QUICK_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")  # each costs a compilation
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
QUERIES = 4
DIRECTIONS = 64  # a multiple of QUERIES
STEPS, SEEDS, REVIEWS = 40, (0, 1, 2), 300
LEARNING: dict[str, Any] = {
    "rank": 8,
    "alpha": 16,
    "layers": "last:8",
    "targets": TARGETS,
    "effective_batch": 8,
    "estimator": "gradient",
}


def projected_gradients(program: CompiledProgram, scale: float, directions: int) -> np.ndarray:
    """Returns g for `directions` directions at B = 0, four per batch: float64 (directions,)."""
    recipe = program.recipe
    examples = program.examples("train")
    runtime = program.open()
    estimates = []
    for number in range(directions // QUERIES):
        first = number * recipe.effective_batch
        batch = pack_step(
            examples[first : first + recipe.effective_batch], recipe, dynamic=program.manifest.dynamic_length
        )
        # With a learning rate of zero B stays 0.
        losses, _ = runtime.step(batch, query_seeds(7, number, QUERIES), 0.0, scale)
        plus, minus = losses.astype(np.float64).reshape(2, QUERIES)
        estimates.append((plus - minus) / (2 * scale))
    runtime.close()
    return np.concatenate(estimates)


def exact_slopes(program: CompiledProgram, directions: int) -> np.ndarray:
    """Returns what `projected_gradients` estimates, by autograd through the same rounded model: (directions,)."""
    recipe = program.recipe
    examples = program.examples("train")
    model = load_model(str(model_file()), "cpu", "float32", recipe.precision, activations=True)
    adapted = AdaptedModel(model, recipe, program.manifest.shape)
    slopes = []
    for number in range(directions // QUERIES):
        first = number * recipe.effective_batch
        batch = pack_step(examples[first : first + recipe.effective_batch], recipe, dynamic=True)
        b = adapted.zeros().requires_grad_()
        (gradient,) = torch.autograd.grad(adapted.losses(batch, b.unsqueeze(0)).sum(), b)
        for k0, k1 in query_seeds(7, number, QUERIES):
            slopes.append(direction("rademacher", (int(k0), int(k1)), adapted.size) @ gradient.numpy())
    return np.array(slopes, np.float64)


def slope(precisions: tuple[Precision, ...], quick: bool, keep: Path) -> Measurement:
    """Measures the agreement of each precision's slopes."""
    rows: list[Row] = []
    claims: Claims = {}
    directions, scales = (DIRECTIONS // 4, QUICK_SCALES) if quick else (DIRECTIONS, SCALES)
    for name in precisions:
        notes.print(f"slope: {name}")
        program = compile_cold(smollm2_recipe(precision=name, queries=QUERIES, sequence_length=36), keep / name)
        exact = exact_slopes(program, directions)
        precision_rows: list[Row] = []
        for scale in scales:
            gradients = projected_gradients(program, scale, directions)
            precision_rows.append(
                {
                    "precision": name,
                    "eps": scale,
                    "agreement": float(np.corrcoef(exact, gradients)[0, 1]),
                    "ratio": float(gradients @ exact / (exact @ exact)),
                    "weights_bytes": program.size("weights"),
                }
            )
        rows += precision_rows
        best = max(precision_rows, key=lambda row: row["agreement"])
        claims[f"slope_agreement_{name.replace('-', '_')}"] = best["agreement"]
        claims[f"slope_agreement_eps_{name.replace('-', '_')}"] = best["eps"]
        claims[f"weights_bytes_{name.replace('-', '_')}"] = program.size("weights")
    return rows, claims


def learning(precisions: tuple[Precision, ...], quick: bool, keep: Path) -> Measurement:
    """Trains each precision's rounded model by exact gradients, and measures it on validation reviews."""
    rows: list[Row] = []
    claims: Claims = {}
    settings = RecipeSettings(sequence_length=64, **LEARNING)
    recipe = smollm2_recipe(**settings.model_dump(exclude={"answer_length", "choices", "loss"}))
    tokenizer, facts = tokenizer_of(str(model_file()), keep), inspect_base(str(model_file()))
    examples = movie_reviews("train", tokenizer, recipe)
    reviews = movie_reviews("validation", tokenizer, recipe)[: 16 if quick else REVIEWS]
    steps, seeds = (2, SEEDS[:1]) if quick else (STEPS, SEEDS)

    def run_of(name: Precision, seed: int) -> Row:
        training = TrainingSettings(
            steps=steps, lr=1e-2, schedule="cosine", seed=seed, evaluation_interval=max(steps // 2, 1)
        )
        run = new_run(Contender(name=name, engine="first-order", recipe=settings, training=training), "validation")
        model = load_model(str(model_file()), "cpu", "float32", name, activations=True)
        learner = torch_learner("first-order", model, recipe, facts, examples)
        learner.cache_prefix()
        before = learner.measure(reviews)
        curve = [
            (evaluation.step, evaluation.accuracy, evaluation.loss)
            for evaluation in train(learner, run, training, reviews)
        ]
        return {
            "precision": name,
            "seed": seed,
            "zero_shot_accuracy": before.accuracy,
            "zero_shot_loss": before.loss,
            "accuracy": 0.0 if run.diverged else curve[-1][1],
            "curve": curve,
        }

    for name in precisions:
        notes.print(f"learning: {name}")
        runs = [
            load_or_compute(keep / f"learning-{name}-{seed}-{steps}.json", partial(run_of, name, seed))
            for seed in seeds
        ]
        rows += runs
        key = name.replace("-", "_")
        claims[f"trained_accuracy_{key}"] = 100 * statistics.mean(row["accuracy"] for row in runs)
        claims[f"zero_shot_loss_{key}"] = runs[0]["zero_shot_loss"]
    return rows, claims


PARTS = {"slope": slope, "learning": learning}


def precision(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None, only: Only = None) -> None:
    """Compare each precision's slopes with exact ones of the same rounded model, and the accuracy it trains to."""
    rows: list[Row] = []
    claims: Claims = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in select_parts(PARTS, only):
            part_rows, part_claims = PARTS[name](
                QUICK_PRECISIONS if quick else PRECISIONS, quick, keep or Path(directory)
            )
            rows += [{"part": name, **row} for row in part_rows]
            claims |= part_claims
    write(json_file, rows, claims)
