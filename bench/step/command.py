"""`bench step`: ratios of steps timed by turns, exact gradients (`reverse`, `precisions`), `text` and its `shapes`.

The ratios are of a MobiZO step on SmolLM2-135M against PyTorch eager, sequential MeZO and the floor, each timed in one
run, by turns, so that a slower machine slows both sides; claims are medians of ratios. Sequences hold random tokens of
exactly the stated length.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.baselines.adapted import AdaptedModel, load_model
from bench.baselines.mezo_program import SequentialMezo, emit_sequential
from bench.baselines.steps import EagerMobizo
from bench.programs import LR, CompiledProgram, Stepper, compile_cold, model_file, random_batch, smollm2_recipe
from bench.result import Claims, Measurement, notes
from bench.runner import Parts, command_of, ratio, time_by_turns
from bench.step.floor import gemm_seconds
from bench.step.precisions import precisions
from bench.step.reverse import reverse
from bench.step.text import LENGTHS, QUICK_LENGTHS, shapes, text_steps
from shared.recipe import DEFAULT_EPS
from shared.zo.noise import query_seeds

EPS = DEFAULT_EPS["fp32"]


def ratios(rounds: int) -> Measurement:
    """Returns no rows, and claims. rounds: timed turns of each comparison."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        notes.print("compiling")
        fp32 = compile_cold(smollm2_recipe(), root / "fp32")
        int8 = compile_cold(smollm2_recipe(precision="int8"), root / "int8")
        return [], {
            "compile_seconds_fp32": fp32.seconds,
            "compile_seconds_cached": cached_seconds(root / "cached"),
            "pte_bytes": fp32.size("program"),
            "ptd_bytes": fp32.size("weights"),
            "ptd_bytes_int8": int8.size("weights"),
            **against_eager(fp32, int8, rounds),
            "gemm_share": share_of_step(fp32, rounds),
            **against_sequential(root, rounds),
            "last_quarter_speedup": frozen_layers(root, fp32, rounds),
        }


def against_eager(fp32: CompiledProgram, int8: CompiledProgram, rounds: int) -> Claims:
    """Times the whole step at q = 4, E = 4, S = 64 in both precisions and in PyTorch eager."""
    notes.print("against eager")
    recipe, shape = fp32.recipe, fp32.manifest.shape
    model = EagerMobizo(AdaptedModel(load_model(), recipe, shape), recipe.paths)

    def eager(number: int) -> np.ndarray:
        batch = random_batch(recipe, shape.vocabulary, recipe.sequence_length, number)
        losses: np.ndarray = model.step(batch, query_seeds(0, number, recipe.queries), LR, EPS)[0].numpy()
        return losses

    steps = {"fp32": Stepper(fp32, recipe.sequence_length), "int8": Stepper(int8, recipe.sequence_length)}
    # The comparison means something only if both implementations agree on the same seeds.
    np.testing.assert_allclose(steps["fp32"](0), eager(0), rtol=1e-3)
    seconds = time_by_turns(rounds, {"eager": eager, **steps})
    return {f"{name}_speedup_vs_eager": ratio(seconds["eager"], seconds[name]) for name in steps}


def share_of_step(program: CompiledProgram, rounds: int) -> float:
    """Returns the share of the step that its matrix products take alone."""
    notes.print("share of step")
    recipe, shape = program.recipe, program.manifest.shape
    gemms = gemm_seconds(recipe, shape, rounds * 4)
    step = time_by_turns(2 * rounds, {"step": Stepper(program, recipe.sequence_length)})["step"]
    return statistics.median(gemms) * shape.layers / statistics.median(step)


def against_sequential(root: Path, rounds: int) -> Claims:
    """Times one call with 2q paths against 2q calls with one, q = 16, E = 1, at two lengths."""
    notes.print("against sequential")
    program = compile_cold(smollm2_recipe(queries=16, effective_batch=1), root / "q16")
    recipe, shape, weights_file = program.recipe, program.manifest.shape, program.path("weights")
    emit_sequential(recipe, str(model_file()), root / "sequential.pte")
    sequential = SequentialMezo(recipe, program.manifest.size, root / "sequential.pte", weights_file)
    claims: Claims = {}
    for length, suffix in ((64, ""), (16, "_s16")):
        parallel = Stepper(program, length)
        sequential.reset()

        def one_by_one(number: int, length: int = length) -> np.ndarray:
            batch = random_batch(recipe, shape.vocabulary, length, number)
            return sequential.step(batch, query_seeds(0, number, recipe.queries), LR, EPS)[0]

        np.testing.assert_allclose(parallel(0), one_by_one(0), rtol=1e-3)
        seconds = time_by_turns(rounds, {"parallel": parallel, "sequential": one_by_one})
        claims[f"parallel_speedup_vs_sequential_q16{suffix}"] = ratio(seconds["sequential"], seconds["parallel"])
    return claims


def frozen_layers(root: Path, all_layers: CompiledProgram, rounds: int) -> float:
    """Returns how many times faster the last quarter of the layers adapts, with cached prefixes, than all."""
    notes.print("frozen layers")
    program = compile_cold(smollm2_recipe(layers="last:25%"), root / "last")
    recipe, length = program.recipe, program.recipe.sequence_length
    uncached, methods = Stepper(program, length), program.methods("prefix", "suffix")
    vocabulary = program.manifest.shape.vocabulary
    batches = [random_batch(recipe, vocabulary, length, number) for number in range(rounds + 1)]
    hidden = [methods("prefix", batch[0])[0] for batch in batches]
    scalars = np.array([LR], np.float32), np.array([EPS], np.float32)

    def cached(number: int) -> np.ndarray:
        seeds = query_seeds(0, number, recipe.queries)
        return methods("suffix", hidden[number], *batches[number][1:], seeds, *scalars)[0]

    np.testing.assert_array_equal(uncached(0), cached(0))
    seconds = time_by_turns(rounds, {"all": Stepper(all_layers, length), "last quarter": cached})
    return ratio(seconds["all"], seconds["last quarter"])


def cached_seconds(directory: Path) -> float:
    """Returns the seconds of `mobizo-server compile` for a recipe that is in its cache, process start included."""
    command = [str(Path(sys.executable).parent / "mobizo-server"), "compile", "--base", str(model_file())]
    recipe = {"layers": "last:1", "targets": ["v_proj"], "queries": 1, "effective_batch": 1, "sequence_length": 8}
    recipe_file = directory.with_name("cached-recipe.json")
    recipe_file.write_text(json.dumps(recipe))
    command += ["--to", str(directory), "--recipe", str(recipe_file)]
    timings = []
    for _ in range(2):
        start = time.perf_counter()
        process = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        timings.append((time.perf_counter() - start, json.loads(process.stdout)["cached"]))
    assert [cached for _, cached in timings] == [False, True]
    return timings[1][0]


ROUNDS, QUICK_ROUNDS = 7, 1  # timed turns of each ratio
REVERSE_ROUNDS = 28  # of one layer, which takes milliseconds
PARTS: Parts = {
    "ratios": lambda quick: ratios(QUICK_ROUNDS if quick else ROUNDS),
    "precisions": precisions,
    "reverse": lambda quick: reverse(QUICK_ROUNDS if quick else REVERSE_ROUNDS),
    "text": lambda quick: text_steps(QUICK_ROUNDS if quick else ROUNDS),
    "shapes": lambda quick: shapes(QUICK_ROUNDS if quick else ROUNDS, QUICK_LENGTHS if quick else LENGTHS),
}
step = command_of(
    PARTS, "Time steps against PyTorch eager, sequential MeZO and parts of a step; a reverse pass; and texts."
)
