"""`python -m bench.step_cell JSON`: one cell of the grid, in a process of its own. Prints its figures as JSON.

What is measured is the step alone: the peak is of resident memory from when the model has been loaded. A process may
also be asked to write what others load: the base in transformers' form, or a program.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from bench.cells import FIRST_ORDER, GROUPINGS, Cell, Contender
from device_agent.memory import peak_rss_bytes, rss_bytes
from shared.lora import BaseShape, flat_size
from shared.noise import query_seeds
from shared.recipe import DEFAULT_EPS, BaseRef

LR = 1e-4
Step = Callable[[tuple[np.ndarray, ...], int], Any]


class Asked(BaseModel):
    """What a process is to do."""

    what: Literal["measure", "compile", "base"]
    cell: Cell
    source: str  # the base model, as the compiler takes it
    base: BaseRef
    shape: BaseShape
    model: str = ""  # the base in transformers' form
    program: str = ""
    weights: str = ""
    rounds: int = 3
    seconds: float = 60.0  # no further round is begun after so many


def main() -> None:
    """Does what the one argument asks."""
    warnings.simplefilter("ignore")
    asked = Asked.model_validate_json(sys.argv[1])
    done: dict[str, Any] = {}
    if asked.what == "base":
        write_model(asked)
    elif asked.what == "compile":
        began = time.perf_counter()
        write_program(asked)
        done["compile_seconds"] = time.perf_counter() - began
    else:
        done = measure(asked)
    print(json.dumps(done))


def measure(asked: Asked) -> dict[str, Any]:
    """Seconds of every round after one that warms up, and the peak of memory over all of them."""
    cell = asked.cell
    step = program_step(asked) if cell.engine == "executorch" else torch_step(asked)
    before = forget_peak()
    seconds: list[float] = []
    began = time.perf_counter()
    warm = 0.0
    while len(seconds) < asked.rounds:
        batch = random_batch(asked, len(seconds))
        at = time.perf_counter()
        step(batch, len(seconds))
        took = time.perf_counter() - at
        if not warm:
            warm = took
            if cell.engine == "compile":
                forget_peak()  # the compiler's own memory is no step's
            continue
        seconds.append(took)
        if time.perf_counter() - began > asked.seconds:
            break
    found = {"seconds": seconds, "first_seconds": warm, "loaded_bytes": before, "peak_rss_bytes": peak_rss_bytes()}
    if cell.device == "cuda":
        import torch

        found |= {"peak_gpu_bytes": torch.cuda.max_memory_allocated()}
    return found


def random_batch(asked: Asked, number: int) -> tuple[np.ndarray, ...]:
    """A step's inputs, as `pack_step` gives them: every sequence of the cell's length, the answer after the last."""
    recipe, vocabulary = asked.cell.recipe(asked.base), asked.shape.vocabulary
    rng = np.random.default_rng(number)
    e, s = recipe.effective_batch, recipe.sequence_length
    tokens, choices = rng.integers(0, vocabulary, (e, s)), rng.integers(0, vocabulary, (e, 1, 2))
    ones = np.ones((e, 1, 2), np.float32), np.ones((e, 1), np.float32)
    return tokens, np.full((e, 1), s - 1), choices, *ones


def forget_peak() -> int:
    """What loading took is no part of a step's peak: gives freed memory back and starts the peak anew, where Linux can.

    Returns the resident bytes now.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if (refs := Path("/proc/self/clear_refs")).exists():
        refs.write_text("5")
    return rss_bytes()


def torch_step(asked: Asked) -> Step:
    """A step of PyTorch's contenders."""
    import torch
    from transformers import AutoModelForCausalLM

    from bench.baselines.adapted import AdaptedModel
    from bench.baselines.eager import EagerMobizo
    from bench.baselines.first_order import FirstOrder, FullFirstOrder
    from bench.baselines.in_place import VectorMezo, mezo_full

    cell, shape = asked.cell, asked.shape
    recipe = cell.recipe(asked.base)
    first = cell.contender in FIRST_ORDER
    half = cell.precision == "fp16"
    dtype = torch.float16 if half and not first else torch.float32
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype).to(cell.device)
    zeroth: Any = None
    differentiate: Any = None
    if cell.contender == Contender.FO_FULL:
        differentiate = FullFirstOrder(model, recipe, shape)
    elif first:
        differentiate = FirstOrder(model, recipe, shape, checkpointing=cell.contender == Contender.FO_CHECKPOINTING)
    elif cell.contender == Contender.MEZO_FULL:
        zeroth, _ = mezo_full(model, recipe, shape)
    elif cell.contender == Contender.MEZO_LORA_FA:
        adapted = AdaptedModel(model, recipe, shape)
        zeroth = VectorMezo(adapted, adapted.zeros())
    else:
        zeroth = EagerMobizo(model, recipe, shape, GROUPINGS[cell.contender])
    if cell.engine == "compile":
        model.model.compile()

    def run(batch: tuple[np.ndarray, ...], number: int) -> None:
        if first:
            with torch.autocast(cell.device, torch.float16, enabled=half):
                differentiate.step(batch, LR)
        else:
            zeroth.step(batch, query_seeds(0, number, recipe.queries), LR, DEFAULT_EPS["fp32"])
        if cell.device == "cuda":
            torch.cuda.synchronize()

    return run


def program_step(asked: Asked) -> Step:
    """A step of an ExecuTorch program that `write_program` wrote."""
    from bench.baselines.mezo import Passes
    from bench.runtime import Methods

    cell = asked.cell
    recipe = cell.recipe(asked.base)
    program, weights, eps = Path(asked.program), Path(asked.weights), DEFAULT_EPS[recipe.precision]
    if cell.contender != Contender.MOBIZO:
        size = flat_size(recipe, asked.shape)
        passes = Passes(recipe, size, program, weights, GROUPINGS[cell.contender])
        return lambda batch, number: passes.step(batch, query_seeds(0, number, recipe.queries), LR, eps)
    methods = Methods(program, weights, ["adapter", "step"])
    scalars = np.array([LR], np.float32), np.array([eps], np.float32)
    return lambda batch, number: methods("step", *batch, query_seeds(0, number, recipe.queries), *scalars)


def write_program(asked: Asked) -> None:
    """Compiles what the cell's step needs; the weights file too, where there is none of its precision."""
    from functools import partial

    from bench.baselines.mezo import emit_passes
    from server.compiler.backends.xnnpack import Xnnpack
    from server.compiler.checkpoint import load_checkpoint
    from server.compiler.network import BaseNetwork, QuantizedBase

    cell, program, weights = asked.cell, Path(asked.program), Path(asked.weights)
    recipe, target = cell.recipe(asked.base), Xnnpack()
    if not weights.exists():
        part = weights.with_suffix(".part")
        target.write_weights(QuantizedBase.of(load_checkpoint(asked.source), recipe.precision).stored(), part)
        part.rename(weights)
    part = program.with_suffix(".part")
    if cell.contender == Contender.MOBIZO:
        base = QuantizedBase.of(load_checkpoint(asked.source), recipe.precision)
        stored = {key for tensor in base.stored() for key in (tensor.key, tensor.name) if key is not None}
        network = BaseNetwork(recipe, base, partial(target.lower, stored=stored))
        methods = network.methods()
        target.emit({name: methods[name] for name in ("adapter", "step")}, stored, part)
    else:
        emit_passes(recipe, asked.source, weights, part, GROUPINGS[cell.contender])
    part.rename(program)


def write_model(asked: Asked) -> None:
    """The base in transformers' form, so that no cell need read another form of it."""
    import torch
    from transformers import AutoModelForCausalLM

    source = Path(asked.source)
    options = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
    where = source.parent if options else source
    read = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    if options:
        # What was read from GGUF counts as quantized for ever and refuses to be saved, though its weights are float32.
        del read.config.quantization_config
        written = AutoModelForCausalLM.from_config(read.config)
        written.load_state_dict(read.state_dict())
        read = written
    part = Path(asked.model).with_suffix(".part")
    read.save_pretrained(part)
    part.rename(asked.model)


if __name__ == "__main__":
    main()
