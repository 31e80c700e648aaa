"""`bench accuracy`: how well each way of training does on the same budget, as the paper's accuracy tables ask.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA; the number of queries; quantized weights;
other adapters. In PyTorch, on a CPU or a GPU, from any base that the compiler reads; on the shipped reviews or on the
paper's own tasks. One step of any of them is 32 sequences through the network, forward or back, so that equal steps are
equal compute; the examples that they saw differ and stand in the tables.
"""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.accuracy_data import SHIPPED, TASKS, read_data
from bench.accuracy_runs import Runner, Setting
from bench.accuracy_tables import FULL, PLAIN, QUICK, Found, Parts
from bench.programs import model_file
from bench.result import write
from bench.step import notes
from shared.errors import MobizoError


class Part(StrEnum):
    """Tables that are made together; their names are methods of `Parts`, but for the last."""

    MAIN = "main"
    QUERIES = "queries"
    PRECISION = "precision"
    VARIANTS = "variants"
    ALL = "all"


REMARKS = {
    "quick": "A quick run of a handful of steps: it shows that everything runs, not how well anything learns.",
    "plain": "A short run for a CPU, its learning rates larger than the paper's, whose runs have 20,000 steps.",
    "full": "The paper's steps, grids and sizes.",
}


def accuracy(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a handful of steps, one seed: only that it runs")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="the paper's steps, grids and sizes; all parts: for a GPU")
    ] = False,
    part: Annotated[list[Part] | None, typer.Option(help="which tables; default: main, with --full all")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help=f"one or several of {', '.join(TASKS)}; default: movies, with --full products too"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="where the files of the paper's tasks are, as their authors' archives unpack")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="a model's directory, .gguf file or Hugging Face id; default: SmolLM2-135M")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="where PyTorch runs")] = "cpu",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="of frozen weights and activations")
    ] = "float32",
    loss: Annotated[Literal["full", "candidates"], typer.Option(help="full is the paper's")] = "full",
    noise: Annotated[
        Literal["rademacher", "gaussian"] | None, typer.Option(help="default: rademacher, with --full the paper's")
    ] = None,
    schedule: Annotated[Literal["constant", "linear", "cosine"], typer.Option(help="of learning rates")] = "constant",
    sequence_length: Annotated[int, typer.Option("--seq-len", min=8, help="longer prompts lose their front")] = 256,
    keep: Annotated[
        Path | None, typer.Option(help="finished runs are kept here, and what is kept here is not run again")
    ] = None,
) -> None:
    """Train and test every method on equal budgets: accuracy, its spread, and the paper's beside it."""
    if quick and full:
        raise typer.BadParameter("--quick or --full, not both")
    if data is not None and not task:
        raise typer.BadParameter("--data needs to know what to read there: say --task")
    kind = "quick" if quick else "full" if full else "plain"
    budget = {"quick": QUICK, "plain": PLAIN, "full": FULL}[kind]
    part = part or [Part.ALL if full else Part.MAIN]
    noise = noise or ("gaussian" if full else "rademacher")
    setting = Setting(
        base=base or str(model_file()),
        device=device,
        dtype=dtype,
        loss=loss,
        sequence_length=sequence_length,
        schedule=schedule,
        noise=noise,
    )
    found = Found()
    with tempfile.TemporaryDirectory() as place:
        for name in task or (list(SHIPPED) if full else ["movies"]):
            try:
                read = read_data(name, data, budget.sizes)
                runner = Runner(setting, read, keep or Path(place))
            except MobizoError as error:
                raise SystemExit(error.detail) from error
            remark = (
                f"{REMARKS[kind]} Loss {loss} (the paper's: full), noise {noise} (the paper's: gaussian), LoRA-FA of "
                f"rank 16 on q_proj and v_proj (the paper names no layers), {dtype} on {device}, "
                f"learning rates {schedule}."
            )
            if dropped := runner.splits.truncated:
                remark += f" {dropped} training prompts were cut to {sequence_length} tokens."
            if read.left_out:
                remark += f" {read.left_out} damaged or unaskable records were left out."
            parts = Parts(runner, budget, found, remark)
            for one in (each for each in Part if each is not Part.ALL and {each, Part.ALL} & {*part}):
                notes.print(f"{name}: {one}")
                getattr(parts, one)()
    write(json_file, found.rows, found.claims, found.tables, found.plots)
