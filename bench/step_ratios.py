"""What a MobiZO step costs on SmolLM2-135M, against PyTorch eager, sequential MeZO, and the floor: ratios.

Everything is timed in one run and compared as ratios: what is compared runs by turns, so that a machine that slows down
slows both, and claims are medians of ratios. Sequences hold random tokens of exactly the stated length.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.floor import gemm_seconds, noise_update_seconds, read_bandwidth
from bench.programs import Compiled, compile_cold, model_file, smollm2_recipe
from bench.step import LR, Stepper, by_turns, notes, peak_rss, random_batch, ratio
from shared.noise import query_seeds
from shared.recipe import DEFAULT_EPS, TARGETS


def measure(rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and claims: fp32 and int8 programs, eager, sequential MeZO, frozen layers, noise, compile, memory.

    rounds: timed turns of each comparison.
    """
    claims: dict[str, float] = {}
    rows: list[dict[str, Any]] = []

    def record(name: str, seconds: Mapping[str, list[float]]) -> None:
        rows.extend({"comparison": name, "what": what, "seconds": statistics.median(s)} for what, s in seconds.items())

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        notes.print("compiling")
        fp32 = compile_cold(smollm2_recipe(), root / "fp32")
        int8 = compile_cold(smollm2_recipe(precision="int8"), root / "int8")
        claims |= {
            "compile_seconds_fp32": fp32.seconds,
            "compile_seconds_int8": int8.seconds,
            "compile_seconds_cached": cached_seconds(root / "cached"),
            "pte_bytes": fp32.size("program"),
            "ptd_bytes": fp32.size("weights"),
            "ptd_bytes_int8": int8.size("weights"),
            "planned_bytes": fp32.manifest.planned_bytes,
        }
        notes.print("measuring memory")
        peak = peak_rss(fp32.directory)
        claims |= {"peak_rss_bytes": peak, "peak_rss_over_ptd": peak / fp32.size("weights")}
        for part in (against_eager, share_of_step, against_sequential, frozen_layers, all_targets, agreement):
            notes.print(part.__name__.replace("_", " "))
            part(root, {"fp32": fp32, "int8": int8}, rounds, record, claims)
    return rows, claims


Programs = Mapping[str, Compiled]
Record = Callable[[str, Mapping[str, list[float]]], None]


def against_eager(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """The whole step of q = 4, E = 4, S = 64 in both precisions and in PyTorch eager on all cores; and shorter ones."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.baselines.eager import EagerMobizo

    recipe = programs["fp32"].manifest.recipe
    model = AutoModelForCausalLM.from_pretrained(model_file().parent, gguf_file=model_file().name, dtype=torch.float32)
    eager = EagerMobizo(model, recipe, programs["fp32"].manifest.shape)

    def eager_step(number: int) -> np.ndarray:
        batch = random_batch(programs["fp32"].manifest, recipe.sequence_length, number)
        losses, _ = eager.step(batch, query_seeds(0, number, recipe.queries), LR, DEFAULT_EPS["fp32"])
        return losses.numpy()

    fp32, int8 = (Stepper(programs[precision], recipe.sequence_length) for precision in ("fp32", "int8"))
    half = Stepper(programs["fp32"], recipe.sequence_length // 2)
    # Two implementations of one algorithm on the same seeds: timing them means something only if they agree.
    np.testing.assert_allclose(fp32(0), eager_step(0), rtol=1e-3)
    seconds = by_turns(rounds, {"eager": eager_step, "fp32": fp32, "int8": int8, "fp32, half length": half})
    record("step", seconds)
    step_seconds = statistics.median(seconds["fp32"])
    claims |= {
        "fp32_speedup_vs_eager": ratio(seconds["eager"], seconds["fp32"]),
        "int8_speedup_vs_eager": ratio(seconds["eager"], seconds["int8"]),
        "half_length_speedup": ratio(seconds["fp32"], seconds["fp32, half length"]),
        "step_seconds_fp32": step_seconds,
        "step_seconds_int8": statistics.median(seconds["int8"]),
        "flops_per_second_fp32": programs["fp32"].manifest.flops_per_step / step_seconds,
    }


def share_of_step(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """How much of the fp32 step its matrix products take when nothing else is done."""
    manifest = programs["fp32"].manifest
    whole = Stepper(programs["fp32"], manifest.recipe.sequence_length)
    before = by_turns(rounds, {"step": whole})["step"]
    gemms = gemm_seconds(manifest.recipe, manifest.shape, rounds * 4)
    after = by_turns(rounds, {"step": whole})["step"]
    alone = statistics.median(gemms) * manifest.shape.layers
    record("floor", {"step": before + after, "its matrix products alone": [alone]})
    claims["gemm_share"] = alone / statistics.median(before + after)


def against_sequential(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """One call for 2q paths against 2q calls for one, q = 16, E = 1, at two lengths; and what a roofline predicts."""
    from bench.baselines.mezo import SequentialMezo

    program = compile_cold(smollm2_recipe(queries=16, effective_batch=1), root / "q16")
    recipe, shape = program.manifest.recipe, program.manifest.shape
    sequential = SequentialMezo(recipe, str(model_file()), program.file("weights"), root)
    flops_per_second = claims["flops_per_second_fp32"] / claims["gemm_share"]
    bandwidth = read_bandwidth()
    weights = 4 * shape.layers * sum(int.__mul__(*shape.features(target)) for target in TARGETS)
    claims |= {"gemm_flops_per_second": flops_per_second, "read_bytes_per_second": bandwidth}
    for length in (64, 16):
        parallel = Stepper(program, length)
        sequential.reset()

        def one_by_one(number: int, length: int = length) -> np.ndarray:
            seeds = query_seeds(0, number, recipe.queries)
            return sequential.step(random_batch(program.manifest, length, number), seeds, LR, DEFAULT_EPS["fp32"])[0]

        np.testing.assert_allclose(parallel(0), one_by_one(0), rtol=1e-3)
        seconds = by_turns(rounds, {"parallel": parallel, "sequential": one_by_one})
        record(f"q = 16, E = 1, S = {length}", seconds)
        suffix = "" if length == 64 else f"_s{length}"
        claims[f"parallel_speedup_vs_sequential_q16{suffix}"] = ratio(seconds["sequential"], seconds["parallel"])
        # Each pass reads the weights and computes; whichever takes longer hides the other.
        path = weights / 2 * length / flops_per_second  # two operations a weight (4 bytes) and token
        reading = weights / bandwidth
        claims[f"parallel_speedup_predicted_q16{suffix}"] = (
            recipe.paths * max(path, reading) / max(recipe.paths * path, reading)
        )


def frozen_layers(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """Adapting the last quarter of the layers on cached prefixes against adapting all."""
    program = compile_cold(smollm2_recipe(layers="last:25%"), root / "last")
    recipe = program.manifest.recipe
    whole = Stepper(programs["fp32"], recipe.sequence_length)
    fresh = Stepper(program, recipe.sequence_length)
    methods = program.methods("prefix", "suffix")
    batches = [random_batch(program.manifest, recipe.sequence_length, number) for number in range(rounds + 1)]
    hidden = [methods("prefix", batch[0])[0] for batch in batches]
    scalars = (np.array([LR], np.float32), np.array([DEFAULT_EPS["fp32"]], np.float32))

    def cached(number: int) -> np.ndarray:
        seeds = query_seeds(0, number, recipe.queries)
        return methods("suffix", hidden[number], *batches[number][1:], seeds, *scalars)[0]

    np.testing.assert_array_equal(fresh(0), cached(0))
    seconds = by_turns(rounds, {"all layers": whole, "last quarter": fresh, "last quarter, cached prefix": cached})
    record("frozen layers", seconds)
    claims["last_quarter_speedup"] = ratio(seconds["all layers"], seconds["last quarter, cached prefix"])
    claims["last_quarter_speedup_uncached"] = ratio(seconds["all layers"], seconds["last quarter"])


def all_targets(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """Noise, perturbed copies and update of all seven linear layers' B, as a share of that step."""
    program = compile_cold(smollm2_recipe(targets=TARGETS), root / "seven")
    recipe = program.manifest.recipe
    seconds = by_turns(rounds, {"step": Stepper(program, recipe.sequence_length)})
    noise = noise_update_seconds(recipe, program.manifest.shape, rounds)
    record("seven targets", seconds | {"noise and update alone": noise})
    claims["noise_update_share"] = statistics.median(noise) / statistics.median(seconds["step"])
    claims["pte_bytes_seven_targets"] = program.size("program")


def agreement(root: Path, programs: Programs, rounds: int, record: Record, claims: dict[str, float]) -> None:
    """Correlation of int8's projected gradients with fp32's over 64 directions, each at its own scale."""
    from bench.precision import projected_gradients

    found = [projected_gradients(programs[precision], DEFAULT_EPS[precision], 64) for precision in ("fp32", "int8")]
    claims["gradient_correlation_int8"] = float(np.corrcoef(*found)[0, 1])


def cached_seconds(directory: Path) -> float:
    """Seconds of `mobizo-server compile` for a recipe that was compiled before, process start included."""
    command = [Path(sys.executable).parent / "mobizo-server", "compile", "--base", model_file(), "--out", directory]
    command += ["--layers", "last:1", "--targets", "v_proj", "--q", "1", "--effective-batch", "1", "--seq-len", "8"]
    found = []
    for _ in range(2):
        began = time.perf_counter()
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
        found.append((time.perf_counter() - began, json.loads(done.stdout)["cached"]))
    assert [cached for _, cached in found] == [False, True]
    return found[1][0]


def draw(claims: Mapping[str, float], directory: Path) -> None:
    """step.png: each speedup as a bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = {
        "fp32 over eager": claims["fp32_speedup_vs_eager"],
        "int8 over eager": claims["int8_speedup_vs_eager"],
        "half length over whole": claims["half_length_speedup"],
        "parallel over sequential, S = 64": claims["parallel_speedup_vs_sequential_q16"],
        "parallel over sequential, S = 16": claims["parallel_speedup_vs_sequential_q16_s16"],
        "last quarter, cached, over all layers": claims["last_quarter_speedup"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    drawn = axes.barh(list(bars), list(bars.values()), color="#3b6ea5")
    axes.bar_label(drawn, fmt="%.2fx", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster (SmolLM2-135M, q = 4, E = 4, S = 64 unless said)")
    figure.savefig(directory / "step.png", dpi=150)
    pyplot.close(figure)
