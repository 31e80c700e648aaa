"""`bench precision`: how well each precision's projected gradients agree with float32's, over perturbation scales.

The same directions on the same batches of movie reviews at B = 0, on SmolLM2-135M. A quantized base is a slightly
different function; below some scale its rounding, not the perturbation, decides the difference of two losses.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.progress import track

from bench.programs import Compiled, compile_cold, smollm2_recipe
from bench.result import Plot, Table, write
from shared.encoding import pack_step
from shared.noise import query_seeds
from shared.recipe import Precision

SCALES = (5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
REFERENCE = 1e-2  # the paper's perturbation scale, at which float32 is the reference
QUERIES = 4
QUICK = ("fp32", "int8")  # each costs a compilation
QUICK_SCALES = (1e-2, 5e-2)  # their defaults


def projected_gradients(program: Compiled, scale: float, directions: int) -> np.ndarray:
    """g of `directions` directions at B = 0, four a batch, float64 (directions,)."""
    recipe = program.manifest.recipe
    examples = program.examples("train")
    runtime = program.open()
    found = []
    for number in range(directions // QUERIES):
        at = number * recipe.effective_batch
        chosen = examples[at : at + recipe.effective_batch]
        batch = pack_step(chosen, recipe, dynamic=program.manifest.dynamic_length)
        # A learning rate of zero leaves B where it is.
        losses, _ = runtime.step(batch, query_seeds(7, number, QUERIES), 0.0, scale)
        pairs = losses.astype(np.float64).reshape(2, QUERIES)
        found.append((pairs[0] - pairs[1]) / (2 * scale))
    runtime.close()
    return np.concatenate(found)


def precision(
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the result here")] = None,
    directions: Annotated[int, typer.Option(min=8, help="random directions, a multiple of 4")] = 64,
    sequence_length: Annotated[int, typer.Option("--seq-len", min=8)] = 36,
    quick: Annotated[
        bool, typer.Option("--quick", help="fp32 and int8, two scales, a quarter of the directions")
    ] = False,
) -> None:
    """Correlate each precision's projected gradients with float32's."""
    rows: list[dict[str, Any]] = []
    claims: dict[str, float] = {}
    reference = None
    directions, scales = (directions // 4, QUICK_SCALES) if quick else (directions, SCALES)
    for name in track(QUICK if quick else get_args(Precision), description="precisions"):
        recipe = smollm2_recipe(precision=name, queries=QUERIES, sequence_length=sequence_length)
        directory = Path(tempfile.mkdtemp())
        try:
            program = compile_cold(recipe, directory)
            found = {scale: projected_gradients(program, scale, directions) for scale in scales}
        finally:
            shutil.rmtree(directory)
        if reference is None:
            reference = found[REFERENCE]
        for scale, gradients in found.items():
            rows.append(
                {
                    "precision": name,
                    "eps": scale,
                    "correlation": float(np.corrcoef(reference, gradients)[0, 1]),
                    "slope": float(gradients @ reference / (reference @ reference)),
                    "weights_bytes": program.size("weights"),
                }
            )
        best = max((row for row in rows if row["precision"] == name), key=lambda row: row["correlation"])
        claims[f"gradient_correlation_{name.replace('-', '_')}"] = best["correlation"]
        claims[f"gradient_correlation_eps_{name.replace('-', '_')}"] = best["eps"]
    write(json_file, rows, claims, *shown(rows, directions))


def shown(rows: list[dict[str, Any]], directions: int) -> tuple[list[Table], list[Plot]]:
    """Correlation by perturbation scale and precision, as a table and a plot."""
    names, scales = (tuple(dict.fromkeys(row[key] for row in rows)) for key in ("precision", "eps"))
    found = {(row["precision"], row["eps"]): row["correlation"] for row in rows}
    table = Table(
        name="correlation",
        title="Correlation of projected gradients with fp32's at the paper's eps 1e-2",
        columns=("eps", *names),
        rows=tuple((scale, *(found[name, scale] for name in names)) for scale in scales),
        notes=f"{directions} Rademacher directions on movie reviews at B = 0, q = 4, E = 4, SmolLM2-135M.",
    )
    plot = Plot(
        name="correlation",
        title="Agreement of each precision's projected gradients with fp32's",
        x="perturbation scale eps",
        y="correlation",
        series={name: tuple((scale, found[name, scale]) for scale in scales) for name in names},
        log_x=True,
    )
    return [table], [plot]
