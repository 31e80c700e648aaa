"""`bench step`, `text` and `shapes`: a step on one text of which every token counts.

Exact gradients of all layers, all seven linear layers adapted with rank 8, one sequence of random tokens. Ours is
the program as the agent runs it: in the native runner, with its file of packed weights. `text` compares with PyTorch,
by turns: the stock transformers model in fp32 with LoRA-FA on the same layers, and logits at the same positions.
`shapes` compares lengths in int8, prime ones among them, by the FLOPs that each does in a second.
"""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench import result
from bench.baselines.adapted import load_model
from bench.baselines.steps import FirstOrder
from bench.programs import LR, Batch, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Measurement, notes
from bench.runner import ratio, time_by_turns
from device_agent.executors.program import Rates, TrainingProgram
from shared.recipe import TARGETS, Precision, Recipe
from shared.zo.encoding import Example, Row
from shared.zo.packing import pack_step

LENGTH = 128
LENGTHS, QUICK_LENGTHS = (31, 32, 64, 100, 127, 128, 255, 256, 512), (31, 32)
PRECISIONS: tuple[Precision, ...] = ("int8", "fp32")


def text_steps(rounds: int) -> Measurement:
    """Returns no rows, and claims. rounds: timed turns."""
    with tempfile.TemporaryDirectory() as name:
        programs = {}
        for precision in PRECISIONS:
            notes.print(f"compiling, {precision}")
            programs[precision] = compile_cold(_recipe(precision, LENGTH), Path(name) / precision)
        recipe, shape = programs["fp32"].recipe, programs["fp32"].manifest.shape
        batches = [text_batch(programs["fp32"], number) for number in range(rounds + 1)]
        ours = {precision: program.serve() for precision, program in programs.items()}
        learner = FirstOrder(load_model(), recipe, shape)
        # The comparison means something only if both compute the same loss.
        np.testing.assert_allclose(
            ours["fp32"].gradient_step(batches[0], Rates(0.0))[0].mean(), learner.step(batches[0], 0.0)[0], rtol=1e-3
        )
        seconds = time_by_turns(
            rounds,
            {
                **{precision: partial(_step, program, batches) for precision, program in ours.items()},
                "PyTorch, fp32": lambda number: learner.step(batches[number], LR),
            },
        )
        for program in ours.values():
            program.close()
    return [], {
        f"text_step_vs_pytorch_{precision}": 1 / ratio(seconds["PyTorch, fp32"], seconds[precision])
        for precision in PRECISIONS
    }


def shapes(rounds: int, lengths: Sequence[int]) -> Measurement:
    """Returns a row of each length, and how much slower the slowest one does its FLOPs. rounds: timed steps of each."""
    rows: list[result.Row] = []
    for length in lengths:
        notes.print(f"{length} tokens")
        with tempfile.TemporaryDirectory() as name:
            program = compile_cold(_recipe("int8", length), Path(name))
            runtime, batches = program.serve(), [text_batch(program, number) for number in range(rounds + 1)]
            seconds = statistics.median(time_by_turns(rounds, {"step": partial(_step, runtime, batches)})["step"])
            runtime.close()
        gflops = program.manifest.flops_per_step / seconds / 1e9
        rows.append({"comparison": "shapes", "length": length, "seconds": seconds, "gflops": gflops})
    speeds = [row["gflops"] for row in rows]
    return rows, {"text_shape_best_over_worst": max(speeds) / min(speeds)}


def _step(program: TrainingProgram, batches: Sequence[Batch], number: int) -> None:
    program.gradient_step(batches[number], Rates(LR))


def _recipe(precision: Precision, length: int) -> Recipe:
    return smollm2_recipe(
        estimator="gradient",
        loss="full",
        targets=TARGETS,
        rank=8,
        precision=precision,
        sequence_length=length,
        answer_length=length - 1,
        choices=1,
        queries=1,
        effective_batch=1,
    )


def text_batch(program: CompiledProgram, number: int) -> Batch:
    """Returns the data inputs of a step on random tokens, all but the first of which are learned."""
    vocabulary, length = program.manifest.shape.vocabulary, program.recipe.sequence_length
    tokens = tuple(np.random.default_rng(number).integers(0, vocabulary, length).tolist())
    return pack_step([Example((Row(tokens[:1], tokens[1:]),), 0, truncated=False)], program.recipe)
