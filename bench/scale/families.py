"""`bench scale --only families`: a tiny random model of every family, trained and decoded in the native runner.

Columns: `step_seconds` is the fastest of ROUNDS steps with exact gradients in int8, all linear layers adapted, on one
text of LENGTH tokens, and `step_over_llama` divides it by Llama's, run by turns; `decode_seconds` is that of one token
after such a text. `loss_error`, in nats, compares the text's mean loss, by the step and by the file for inference, with
that of transformers on the rounded weights. At these sizes most of the time passes between kernels.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from bench.generate import decode_seconds
from bench.programs import LR, CompiledProgram, reopen
from bench.result import Measurement, Row, notes
from bench.runner import load_or_compute, time_by_turns
from bench.step.text import text_batch
from device_agent.executors.program import Rates, TrainingProgram
from device_agent.executors.runner import RunnerLauncher
from device_agent.inference.session import open_inference
from device_agent.runner.location import find_runner
from server.compiler.program import compile_program
from tests.server.compiler.reference import round_weights
from tests.server.compiler.test_families import FAMILIES, Family, make_family

LENGTH, ROUNDS, DECODE_ROUNDS = 16, 60, 10
TYPES = tuple(name for name in FAMILIES if " " not in name)  # other entries have other settings of these
LLAMA = "llama"
TEXT = {"sequence_length": LENGTH, "answer_length": LENGTH - 1, "choices": 1, "effective_batch": 1}


def families(names: Sequence[str], directory: Path) -> Measurement:
    """Returns a row of each family, and claims. directory: keeps bases and programs."""
    llama = _compile(LLAMA, directory)[1]
    rows = [_measure(name, *_compile(name, directory), llama) for name in names]
    return rows, {
        "families_run": float(len(rows)),
        "families_worst_loss_error": max(row["loss_error"] for row in rows),
        "families_slowest_step_over_llama": max(row["step_over_llama"] for row in rows),
    }


def _compile(name: str, directory: Path) -> tuple[Family, CompiledProgram]:
    notes.print(f"family {name}")
    made, program = make_family(directory / name / "base", name, FAMILIES[name]), directory / name / "program"
    recipe = made.recipe(estimator="gradient", precision="int8", loss="full", **TEXT)
    # In this process, which imports the compiler once.
    compiled = partial(compile_program, recipe, str(made.directory), program)
    load_or_compute(program / "manifest.json", lambda: compiled().model_dump(mode="json"))
    return made, reopen(program)


@torch.no_grad()
def _measure(name: str, made: Family, program: CompiledProgram, llama: CompiledProgram) -> Row:
    batches = [text_batch(program, number) for number in range(ROUNDS + 1)]
    text = [int(batches[0][0][0, 0]), *batches[0][2][0].tolist()]  # a token, and those that a step learns
    tokens = torch.tensor([text])
    loss = round_weights(made.model)(tokens, labels=tokens).loss.item()

    def step(training: TrainingProgram, number: int) -> float:
        return float(training.gradient_step(batches[number], Rates(LR))[0][0])

    with closing(program.serve()) as training, closing(llama.serve()) as other:
        step_loss = step(training, 0)
        seconds = time_by_turns(ROUNDS, {LLAMA: partial(step, other), name: partial(step, training)})
    files = program.path("inference"), program.path("weights")
    with closing(open_inference(program.manifest, *files, RunnerLauncher(find_runner()))) as inference:
        score_loss = -inference.score(text[:1], [text[1:]])[0] / (LENGTH - 1)
        decoded = [decode_seconds(inference, text, LENGTH) for _ in range(DECODE_ROUNDS)]
    return {
        "family": name,
        "step_seconds": min(seconds[name]),
        "step_over_llama": min(seconds[name]) / min(seconds[LLAMA]),
        "decode_seconds": min(decoded),
        "loss_error": max(abs(step_loss - loss), abs(score_loss - loss)),
    }
