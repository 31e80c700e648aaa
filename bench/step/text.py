"""`bench step`, `text`: a step on one text of which every token counts.

Exact gradients of all layers, all seven linear layers adapted with rank 8, one sequence of random tokens. Ours is
the program as the agent runs it: in the native runner, with its file of packed weights. It is compared with PyTorch, by
turns: the stock transformers model in fp32 with LoRA-FA on the same layers, and logits at the same positions.
"""

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.baselines.pytorch_model import load_model
from bench.baselines.steps import FirstOrder
from bench.programs import LR, Batch, CompiledProgram, compile_cold, model_file, smollm2_recipe
from bench.result import Measurement, notes
from bench.runner import ratio, time_by_turns
from device_agent.executors.program import Rates, TrainingProgram
from shared.recipe import TARGETS, Precision, Recipe
from shared.zo.encoding import Example, Row
from shared.zo.packing import pack_step

LENGTH = 128
PRECISIONS: tuple[Precision, ...] = ("int8", "fp32")


def text_steps(rounds: int) -> Measurement:
    """Returns no rows, and claims. rounds: timed turns."""
    with tempfile.TemporaryDirectory() as name:
        programs = {}
        for precision in PRECISIONS:
            notes.print(f"compiling, {precision}")
            programs[precision] = compile_cold(_recipe(precision), Path(name) / precision)
        recipe, shape = programs["fp32"].recipe, programs["fp32"].manifest.shape
        batches = [text_batch(programs["fp32"], number) for number in range(rounds + 1)]
        ours = {precision: program.serve() for precision, program in programs.items()}
        learner = FirstOrder(load_model(str(model_file())), recipe, shape)
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


def _step(program: TrainingProgram, batches: Sequence[Batch], number: int) -> None:
    program.gradient_step(batches[number], Rates(LR))


def _recipe(precision: Precision) -> Recipe:
    return smollm2_recipe(
        estimator="gradient",
        loss="full",
        targets=TARGETS,
        rank=8,
        precision=precision,
        sequence_length=LENGTH,
        answer_length=LENGTH - 1,
        choices=1,
        queries=1,
        effective_batch=1,
    )


def text_batch(program: CompiledProgram, number: int) -> Batch:
    """Returns the data inputs of a step on random tokens, all but the first of which are learned."""
    vocabulary, length = program.manifest.shape.vocabulary, program.recipe.sequence_length
    tokens = tuple(np.random.default_rng(number).integers(0, vocabulary, length).tolist())
    return pack_step([Example((Row(tokens[:1], tokens[1:]),), 0, truncated=False)], program.recipe)
