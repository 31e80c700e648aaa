"""`mobizo-server compile`: compiles programs without a home."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer
from rich.table import Table

from server.cli.console import Json, complaints, output
from shared.invalid_fields import first_invalid
from shared.program import ProgramManifest
from shared.recipe import ANSWER_QUERIES, DEFAULT_QUERIES, RecipeSettings
from shared.zo.calibration import read_calibration


def compile_program(
    base: Annotated[str, typer.Option(help="base model: Hugging Face directory or id, or a .gguf file")],
    out: Annotated[Path, typer.Option("--to", help="directory for the program, its weights and manifest.json")],
    precision: Annotated[str, typer.Option(help="fp32, int8, int4, int8-weight or int4-weight")] = "fp32",
    rank: Annotated[int, typer.Option(help="LoRA rank")] = 16,
    alpha: Annotated[float, typer.Option(help="LoRA alpha")] = 32,
    targets: Annotated[str, typer.Option(help="adapted linear layers, comma-separated")] = "q_proj,v_proj",
    layers: Annotated[str, typer.Option(help="adapted decoder layers: all, last:K, last:P%, or 0,1,...")] = "all",
    queries: Annotated[
        int | None,
        typer.Option(
            help="random directions per step; default: "
            f"{DEFAULT_QUERIES['replay']}, with estimator directional {DEFAULT_QUERIES['directional']}, with perturbed "
            f"answers {ANSWER_QUERIES}",
        ),
    ] = None,
    effective_batch: Annotated[int, typer.Option("--effective-batch", help="examples per path")] = 4,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            help="with estimators gradient and directional: examples computed at once, a divisor of --effective-batch; "
            "default: all",
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="maximum tokens per example")] = 64,
    answer_length: Annotated[int, typer.Option("--answer-length", help="maximum tokens per answer")] = 1,
    choices: Annotated[int, typer.Option(help="maximum answers per example")] = 2,
    loss: Annotated[str, typer.Option(help="full or candidates")] = "full",
    estimator: Annotated[
        str,
        typer.Option(
            help="replay; stored: the paper's Algorithm 2; gradient: exact gradients; or directional: exact gradients "
            "recorded as one number for each direction"
        ),
    ] = "replay",
    optimizer: Annotated[
        str, typer.Option(help="of estimators gradient and directional: sgd, momentum or adam")
    ] = "adam",
    perturbed: Annotated[
        str,
        typer.Option(
            help="with estimator replay: all positions, or answers: only the positions that predict answer tokens"
        ),
    ] = "all",
    noise: Annotated[
        str,
        typer.Option(
            help="rademacher or gaussian; estimator stored also supports randn, and operator: gaussian noise drawn by "
            "a custom operator that only the native runner provides"
        ),
    ] = "rademacher",
    backend: Annotated[str, typer.Option(help="xnnpack, portable, torch, qnn or vulkan")] = "xnnpack",
    calibration: Annotated[
        Path | None, typer.Option(help="file created by `calibrate` from which A is taken; default: random A")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile a program into a directory. A complete program of the same recipe there is reused."""
    from server.programs.local import compile_into

    began = time.monotonic()
    settings = settings_of(
        {
            "precision": precision,
            "rank": rank,
            "alpha": alpha,
            "targets": tuple(target.strip() for target in targets.split(",")),
            "layers": layers_of(layers),
            **({} if queries is None else {"queries": queries}),  # the default depends on the estimator
            "effective_batch": effective_batch,
            "micro_batch": micro_batch,
            "sequence_length": sequence_length,
            "answer_length": answer_length,
            "choices": choices,
            "loss": loss,
            "estimator": estimator,
            "optimizer": optimizer,
            "perturbed": perturbed,
            "noise": noise,
            "backend": backend,
            "calibration": None if calibration is None else read_calibration(calibration).sha256,
        }
    )
    with complaints.status("reading the base") as status:
        compiled = compile_into(
            settings, base, out, lambda progress: status.update(str(progress.get("stage", "compiling"))), calibration
        )
    figures = _figures(compiled.manifest, time.monotonic() - began, compiled.cached)
    if as_json:
        output.print(json.dumps(figures), markup=False)
        return
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:,}" if type(value) is int else str(value))
    output.print(table)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppresses the warnings that ExecuTorch's libraries emit while they are imported."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def layers_of(text: str) -> str | tuple[int, ...]:
    """Parses the option `--layers`: returns indices as a tuple of integers, and `all` or `last:...` unchanged."""
    parts = text.split(",")
    return tuple(int(part) for part in parts) if all(part.strip().isdecimal() for part in parts) else text


def settings_of(values: dict[str, Any]) -> RecipeSettings:
    """Returns recipe settings from command-line options. An invalid value ends the command with exit code 2."""
    try:
        return RecipeSettings.model_validate(values)
    except pydantic.ValidationError as error:
        first = first_invalid(error)
        option = f"--{str(first.location[0]).replace('_', '-')}: " if first.location else ""
        complaints.print(f"error: {option}{first.message}", style="red", markup=False)
        raise typer.Exit(2) from error


def _figures(manifest: ProgramManifest, seconds: float, cached: bool) -> dict[str, Any]:
    sizes = {file.role: file.size for file in manifest.files}
    return {
        "recipe_id": manifest.recipe_id,
        "seconds": round(seconds, 3),
        "cached": cached,
        "pte_bytes": sizes["program"],
        "ptd_bytes": sizes["weights"],
        **({"inference_bytes": sizes["inference"]} if "inference" in sizes else {}),
        "planned_bytes": manifest.planned_bytes,
        "delegates": manifest.delegates,
        "nodes": manifest.nodes,
        "flops_per_step": manifest.flops_per_step,
    }
