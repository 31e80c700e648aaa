"""`bench scale`: bases from 135 million to 7 billion weights, of random values made on the spot, on one machine.

For each size: seconds and peak memory of the compilation (of its whole process tree), file sizes, and on the device
(native runner) the seconds until the weights are loaded, peak resident memory and seconds per step. `replay` adapts all
layers with q = 2, E = 2; `gradient` the last 8 with E = 4; S = 64, and every record fills it. The floor of a step in
float32 is its matrix products alone, in XNNPACK.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bench.programs import Compiled, compile_cold
from bench.result import Claims, Row, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, chosen, native_runner
from bench.step.floor import gemm_seconds
from bench.tiny import plan_of, write_base
from device_agent.engines.child_process import NativeEngine
from device_agent.training.journal import RunDirectory
from server.compiler.checkpoints.base import locate_base
from shared.job import Progress, Result
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.training_settings import TrainingSettings

SHARD = 1 << 30  # bytes of a checkpoint's file
POLL_SECONDS = 0.05
COMMON: dict[str, Any] = {"rank": 8, "sequence_length": 64, "answer_length": 6, "choices": 2}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "replay": {"targets": ("v_proj", "o_proj"), "queries": 2, "effective_batch": 2},
    "gradient": {"targets": TARGETS, "layers": "last:8", "effective_batch": 4},
}


@dataclass(frozen=True)
class Size:
    """A base model's architecture. runs: its precisions and estimators. name: in claims."""

    model: str
    config: dict[str, Any]
    runs: tuple[tuple[str, str], ...] = (("int8", "replay"), ("int8", "gradient"))
    name: str | None = None


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }


TIED = {"tie_word_embeddings": True}
SIZES = {
    "SmolLM2-135M": Size("llama", _llama(576, 1536, 30, 9, 3, 49152) | TIED),
    "SmolLM2-360M": Size("llama", _llama(960, 2560, 32, 15, 5, 49152) | TIED),
    "TinyLlama-1.1B": Size(
        "llama",
        _llama(2048, 5632, 22, 32, 4, 32000),
        (("int8", "replay"), ("int8", "gradient"), ("fp32", "replay")),
        "1b",
    ),
    "OPT-1.3B": Size(
        "opt",
        {
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
        (("int8", "replay"),),
    ),
    "Qwen3-1.7B": Size(
        "qwen3", _llama(2048, 6144, 28, 16, 8, 151936) | TIED | {"head_dim": 128}, (("int8", "replay"),)
    ),
    "Llama2-7B": Size("llama", _llama(4096, 11008, 32, 32, 32, 32000), (("int8", "replay"),), "7b"),
}
QUICK = Size("llama", _llama(64, 96, 2, 4, 2, 300) | TIED, (("int8", "replay"), ("fp32", "replay")), "1b")


def scale(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Compile and train bases from 135M to 7B, of random weights: memory, time and sizes."""
    rows: list[Row] = []
    claims: Claims = {}
    runner = NativeEngine(native_runner())
    sizes = {"tiny": QUICK} if quick else SIZES
    for what in chosen(sizes, only):
        size = sizes[what]
        with tempfile.TemporaryDirectory(dir=keep) as name:
            base = Path(name) / "base"
            notes.print(f"{what}: random weights")
            parameters = write_random_base(size, base)
            for precision, estimator in size.runs:
                notes.print(f"{what}: {estimator} in {precision}")
                row = _measure(runner, Path(name) / f"{precision}-{estimator}", base, precision, estimator)
                rows.append({"base": what, "parameters": parameters, **row})
                claims |= _claims(size, rows[-1])
                shutil.rmtree(Path(name) / f"{precision}-{estimator}")
    claims |= _slopes(rows)
    write(json_file, rows, claims)


def write_random_base(size: Size, directory: Path) -> int:
    """Writes a checkpoint in the Hugging Face form, in bfloat16; returns its number of weights."""
    write_base(directory)  # for its byte-level tokenizer
    (directory / "model.safetensors").unlink()
    config = AutoConfig.for_model(size.model, **size.config)
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"torch_dtype": "bfloat16"}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)).to(torch.bfloat16)
    index: dict[str, str] = {}
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number:03d}.safetensors"
        save_file({name: _random(noise, shapes[name]) for name in names}, directory / file)
        index |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(map(math.prod, shapes.values()))


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yields names of tensors that fill a file each."""
    names: list[str] = []
    for name in shapes:
        if names and sum(2 * math.prod(shapes[each]) for each in (*names, name)) > SHARD:
            yield names
            names = []
        names.append(name)
    yield names


def _random(noise: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of this shape: ones for a norm, else the noise again and again."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = math.prod(shape)
    return noise.repeat(-(-count // len(noise)))[:count].view(shape)


def _measure(engine: NativeEngine, directory: Path, base: Path, precision: str, estimator: str) -> Row:
    recipe = Recipe.model_validate(
        {
            "base": BaseRef(name="random", sha256=locate_base(str(base)).sha256),
            "precision": precision,
            "estimator": estimator,
        }
        | COMMON
        | ESTIMATORS[estimator]
    )
    with PeakMemory() as compiling:
        program = compile_cold(recipe, directory, base)
    result, load_seconds = _train(engine, program, directory)
    step_seconds = result.train_seconds / result.steps
    floor = None
    if estimator == "replay" and precision == "fp32":
        shape = program.manifest.shape
        floor = statistics.median(gemm_seconds(recipe, shape, 3)) * shape.layers
    return {
        "precision": precision,
        "estimator": estimator,
        "compile_seconds": program.seconds,
        "compile_peak_bytes": compiling.bytes,
        "ptd_bytes": program.size("weights"),
        "pte_bytes": program.size("program"),
        "load_seconds": load_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
        "step_seconds": step_seconds,
        "gflops": program.manifest.flops_per_step / step_seconds / 1e9,
        "floor_seconds": floor,
    }


def _train(engine: NativeEngine, program: Compiled, directory: Path) -> tuple[Result, float]:
    """Trains two steps; returns the result and the seconds until the weights were loaded."""
    data = directory / "data"
    data.mkdir()
    for split, count in (("train", 8), ("validation", 2)):
        record = {"text": "a long sentence about a film " * 10, "label": "1"}
        (data / f"{split}.jsonl").write_text((json.dumps(record) + "\n") * count)
    settings = TrainingSettings(steps=2, lr=1e-3, evaluation_interval=2)
    run = RunDirectory(directory / "run")
    run.begin(plan_of(program, data, settings))
    began, loaded = time.monotonic(), []

    def report(progress: Progress) -> None:
        if progress.phase != "loading":
            loaded.append(time.monotonic() - began)

    message = engine.train(run, report, lambda: False)
    if message.result is None:
        raise SystemExit(f"training failed: {message.detail}")
    return message.result, loaded[0]


class PeakMemory:
    """Polls the resident memory of this process's children, all together, while it is entered. bytes: the highest."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._done.wait(POLL_SECONDS):
            total = 0
            for process in own.children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_info().rss
            self.bytes = max(self.bytes, total)


def _claims(size: Size, row: Row) -> Claims:
    """Returns the claims of one row, for the sizes that have some."""
    precision = row["precision"]
    claims: Claims = {}
    if size.name == "1b" and row["estimator"] == "replay":
        claims[f"device_peak_rss_over_weights_{precision}"] = row["peak_rss_bytes"] / row["ptd_bytes"]
    if size.name == "1b" and precision == "int8":
        claims["compile_peak_over_result_1b"] = row["compile_peak_bytes"] / row["ptd_bytes"]
    if size.name == "1b" and row["floor_seconds"]:
        claims["step_seconds_1b_over_floor"] = row["step_seconds"] / row["floor_seconds"]
    if size.name == "7b":
        claims |= {"compile_peak_bytes_7b": row["compile_peak_bytes"], "compile_seconds_7b": row["compile_seconds"]}
    return claims


def _slopes(rows: list[Row]) -> Claims:
    """Returns the exponents of a power law in the number of weights, of int8's `replay`, where sizes differ enough."""
    found = [row for row in rows if (row["precision"], row["estimator"]) == ("int8", "replay")]
    if len(found) < 3:
        return {}
    weights = np.log([row["parameters"] for row in found])
    keys = ("compile_seconds", "peak_rss_bytes", "step_seconds")
    return {f"{key}_slope": float(np.polyfit(weights, np.log([row[key] for row in found]), 1)[0]) for key in keys}
