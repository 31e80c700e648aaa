"""`bench scale --only families`: a tiny random model of every family, trained and decoded in the native runner.

Columns: `step_seconds` is the median of steps with exact gradients in int8, all linear layers adapted, on one text of
LENGTH tokens, and `step_over_llama` compares it with Llama's by turns; `decode_seconds` is that of one token.
`step_loss_error` and `decode_loss_error` compare the native runner with transformers on the rounded weights: a text's
mean loss, and that of the tokens after its PROMPT, nats. At these sizes most of the time is spent between kernels, so
that the ratio counts what a family adds to Llama's graph.
"""

import statistics
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from bench.generate import decode_seconds
from bench.programs import LR, MANIFEST, CompiledProgram, reopen
from bench.result import Claims, Row, notes
from bench.runner import ratio, time_by_turns
from bench.step.text import open_in_runner, text_batch
from device_agent.executors.program import Rates, TrainingProgram
from device_agent.executors.runner import RunnerLauncher
from device_agent.inference.session import open_inference
from device_agent.runner.location import find_runner
from server.compiler.program import compile_program
from tests.server.compiler.reference import round_weights
from tests.server.compiler.test_families import FAMILIES, Family, make_family

LENGTH, PROMPT, DECODED = 16, 8, 16  # tokens
ROUNDS, DECODE_ROUNDS = 60, 5
TYPES = tuple(name for name in FAMILIES if " " not in name)  # other entries have other settings of these
LLAMA = "llama"
TEXT = {"sequence_length": LENGTH, "answer_length": LENGTH - 1, "choices": 1, "effective_batch": 1}


def family_rows(names: Sequence[str], directory: Path) -> list[Row]:
    """Returns a row of each family. directory: keeps bases and programs, which are compiled once."""
    llama = _compile(LLAMA, directory)[1]
    return [_measure(name, *_compile(name, directory), llama) for name in names]


def family_claims(rows: list[Row]) -> Claims:
    """Returns the claims of families."""
    return {
        "families_run": float(len(rows)),
        "families_worst_loss_error": max(max(row["step_loss_error"], row["decode_loss_error"]) for row in rows),
        "families_slowest_step_over_llama": max(row["step_over_llama"] for row in rows),
    }


def _compile(name: str, directory: Path) -> tuple[Family, CompiledProgram]:
    notes.print(f"family {name}")
    made = make_family(directory / name / "base", name, FAMILIES[name])
    recipe = made.recipe(estimator="gradient", precision="int8", loss="full", **TEXT)
    program = directory / name / "program"
    if not (program / MANIFEST).exists():  # in this process, which has imported the compiler once
        manifest = compile_program(recipe, str(made.directory), program)
        (program / MANIFEST).write_text(manifest.model_dump_json())
    return made, reopen(program)


def _measure(name: str, made: Family, program: CompiledProgram, llama: CompiledProgram) -> Row:
    batches = [text_batch(program, number) for number in range(ROUNDS + 1)]
    text = batches[0][0][0].tolist()
    nll = _losses(made, text)

    def step(training: TrainingProgram, number: int) -> float:
        return float(training.gradient_step(batches[number], Rates(LR))[0][0])

    with closing(open_in_runner(program)) as training, closing(open_in_runner(llama)) as other:
        step_loss = step(training, 0)
        seconds = time_by_turns(ROUNDS, {LLAMA: partial(step, other), name: partial(step, training)})
    files = program.path("inference"), program.path("weights")
    with closing(open_inference(program.manifest, *files, RunnerLauncher(find_runner()))) as inference:
        (score,) = inference.score(text[:PROMPT], [text[PROMPT:]])
        decoded = [decode_seconds(inference, text[:PROMPT], DECODED) for _ in range(DECODE_ROUNDS)]
    return {
        "family": name,
        "step_seconds": statistics.median(seconds[name]),
        "step_over_llama": ratio(seconds[name], seconds[LLAMA]),
        "decode_seconds": statistics.median(decoded),
        "step_loss_error": abs(step_loss - nll.mean().item()),
        "decode_loss_error": abs(-score / (LENGTH - PROMPT) - nll[PROMPT - 1 :].mean().item()),
    }


@torch.no_grad()
def _losses(made: Family, text: list[int]) -> torch.Tensor:
    """Returns transformers' loss (LENGTH - 1,) of each token of a text but the first."""
    tokens = torch.tensor([text])
    return torch.nn.functional.cross_entropy(
        round_weights(made.model)(tokens).logits[0, :-1], tokens[0, 1:], reduction="none"
    )
