"""`bench accuracy`: accuracy of each training method at the same budget, as in the paper's accuracy tables.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA; the number of queries; quantized weights;
other adapters. Training runs in PyTorch, on a CPU or GPU, from any base that the compiler reads, on the shipped reviews
or other records of a shipped template. One step of any method is 32 sequences through the network, forward or back, so
that equal steps are equal compute; the number of examples seen differs.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.accuracy.parts import FULL, PARTS, PLAIN, QUICK, Parts
from bench.accuracy.runs import SHIPPED, Runner, Setting, read_data
from bench.programs import model_file
from bench.result import Claims, Row, notes, write
from bench.runner import Full, JsonFile, Keep, chosen
from bench.runner import Quick as QuickOption
from shared.errors import MobizoError


def accuracy(
    json_file: JsonFile = None,
    quick: QuickOption = False,
    full: Full = False,
    keep: Keep = None,
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}, or all; default: main.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="movies, products or a shipped template; default: movies.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of the task's train.jsonl and test.jsonl.")] = None,
    base: Annotated[str | None, typer.Option(help="Model directory, .gguf file or id; default: SmolLM2-135M.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="The device of PyTorch.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="Type of frozen weights and activations.")
    ] = "float32",
    sequence_length: Annotated[int, typer.Option("--seq-len", min=8, help="Longer prompts lose their front.")] = 256,
) -> None:
    """Train and test every method on equal budgets: accuracy and its spread."""
    if quick and full:
        raise typer.BadParameter("choose --quick or --full")
    if data is not None and not task:
        raise typer.BadParameter("--data needs --task")
    wanted = ["all"] if full and not part else part or ["main"]
    names = chosen(dict.fromkeys(PARTS), None if "all" in wanted else wanted)
    budget = QUICK if quick else FULL if full else PLAIN
    setting = Setting(
        base=base or str(model_file()),
        device=device,
        dtype=dtype,
        sequence_length=sequence_length,
        noise="gaussian" if full else "rademacher",
    )
    rows: list[Row] = []
    claims: Claims = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in task or (list(SHIPPED) if full else ["movies"]):
            try:
                records = read_data(name, data, budget.sizes)
                parts = Parts(Runner(setting, records, keep or Path(directory)), budget)
            except MobizoError as error:
                raise SystemExit(error.detail) from error
            for one in names:
                notes.print(f"{name}: {one}")
                getattr(parts, one)()
            rows += parts.rows
            claims |= parts.claims
    write(json_file, rows, claims)
