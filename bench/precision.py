"""`bench precision`: how well each precision's projected gradients agree with float32's, over perturbation scales.

All precisions use the same directions on the same batches of movie reviews at B = 0, on SmolLM2-135M. A quantized base
is a slightly different function: below some scale its rounding, not the perturbation, decides the difference of two
losses.
"""

import tempfile
from pathlib import Path
from typing import get_args

import numpy as np

from bench.programs import Compiled, compile_cold, smollm2_recipe
from bench.result import Claims, Row, notes, write
from bench.runner import JsonFile, Quick
from shared.recipe import Precision
from shared.zo.encoding import pack_step
from shared.zo.noise import query_seeds

SCALES, QUICK_SCALES = (5e-3, 1e-2, 2e-2, 5e-2, 1e-1), (1e-2, 5e-2)
QUICK = ("fp32", "int8")  # each costs a compilation
REFERENCE = 1e-2  # the paper's perturbation scale, at which float32 is the reference
QUERIES = 4
DIRECTIONS = 64  # a multiple of QUERIES


def projected_gradients(program: Compiled, scale: float, directions: int) -> np.ndarray:
    """Returns g for `directions` directions at B = 0, four per batch: float64 (directions,)."""
    recipe = program.recipe
    examples = program.examples("train")
    runtime = program.open()
    found = []
    for number in range(directions // QUERIES):
        at = number * recipe.effective_batch
        batch = pack_step(examples[at : at + recipe.effective_batch], recipe, dynamic=program.manifest.dynamic_length)
        # With a learning rate of zero B stays 0.
        losses, _ = runtime.step(batch, query_seeds(7, number, QUERIES), 0.0, scale)
        plus, minus = losses.astype(np.float64).reshape(2, QUERIES)
        found.append((plus - minus) / (2 * scale))
    runtime.close()
    return np.concatenate(found)


def precision(json_file: JsonFile = None, quick: Quick = False) -> None:
    """Correlate each precision's projected gradients with float32's."""
    rows: list[Row] = []
    claims: Claims = {}
    reference = np.empty(0)
    directions, scales = (DIRECTIONS // 4, QUICK_SCALES) if quick else (DIRECTIONS, SCALES)
    for name in QUICK if quick else get_args(Precision):
        notes.print(name)
        with tempfile.TemporaryDirectory() as directory:
            recipe = smollm2_recipe(precision=name, queries=QUERIES, sequence_length=36)
            program = compile_cold(recipe, Path(directory))
            found = {scale: projected_gradients(program, scale, directions) for scale in scales}
        if not len(reference):
            reference = found[REFERENCE]
        new = [
            {
                "precision": name,
                "eps": scale,
                "correlation": float(np.corrcoef(reference, gradients)[0, 1]),
                "slope": float(gradients @ reference / (reference @ reference)),
                "weights_bytes": program.size("weights"),
            }
            for scale, gradients in found.items()
        ]
        rows += new
        best = max(new, key=lambda row: row["correlation"])
        claims[f"gradient_correlation_{name.replace('-', '_')}"] = best["correlation"]
        claims[f"gradient_correlation_eps_{name.replace('-', '_')}"] = best["eps"]
    write(json_file, rows, claims)
