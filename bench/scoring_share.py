"""`python -m bench.scoring_share ROUNDS`: where a batch of 64 rows spends its time, and what its floor is. Prints JSON.

In a process of its own, since the rest of the benchmark holds no torch. Batches are of one length, by turns: 64
adapters of one recipe; one; none; 64 recipes that share nothing (other seeds of A); the 64 adapters on all linear
layers. `own products` are `AdaptedRows.add` alone, on activations of the same shapes, over all layers; their floor is
the larger of their multiplications at the rate that the base's products reach and of B and activations moved once.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import numpy as np
import torch

from bench.floor import read_bandwidth
from bench.programs import model_file, smollm2_recipe
from bench.step import by_turns, ratio
from server.compiler.checkpoint import load_checkpoint
from server.compiler.lora_rows import AdaptedRows, Projections, ServedAdapter
from server.compiler.serving import ScoredText, ServingBase
from shared.recipe import TARGETS, Recipe

ROWS, LENGTH = 64, 24
DEVIATION = 0.01


def measure(rounds: int) -> dict[str, Any]:
    """Rows and claims."""
    base = ServingBase(load_checkpoint(str(model_file())))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, base.facts.vocabulary, LENGTH).tolist() for _ in range(ROWS)]
    same = _adapters(base, [smollm2_recipe()] * ROWS)
    kinds: dict[str, list[ServedAdapter | None]] = {
        "64 adapters": [*same],
        "1 adapter": [same[0]] * ROWS,
        "base": [None] * ROWS,
        "64 recipes": [*_adapters(base, [smollm2_recipe(a_seed=number) for number in range(ROWS)])],
        "64 adapters, all layers' products": [*_adapters(base, [smollm2_recipe(targets=TARGETS)] * ROWS)],
    }

    def batch(adapters: list[ServedAdapter | None]) -> Any:
        asked = [ScoredText(text, LENGTH - 1, [[1], [2]], each) for text, each in zip(texts, adapters, strict=True)]
        return lambda number: base.score(asked)

    calls = {name: batch(adapters) for name, adapters in kinds.items()}
    own = {f"own products, {name}": _own(base, kinds[name]) for name in ("64 adapters", "1 adapter")}
    seconds = by_turns(rounds, calls | own)
    floor = _floor(base, same[0], statistics.median(seconds["base"]))
    rows = [
        {"what": name, "rows": ROWS, "tokens": LENGTH, "seconds": statistics.median(s)} for name, s in seconds.items()
    ]
    rows.append({"what": "own products, floor", "seconds": floor})
    one = seconds["1 adapter"]
    return {
        "rows": rows,
        "claims": {
            "batch_64_vs_1": ratio(seconds["64 adapters"], one),
            "batch_64_recipes_vs_1": ratio(seconds["64 recipes"], one),
            "batch_64_all_products_vs_1": ratio(seconds["64 adapters, all layers' products"], one),
            "batch_1_vs_base": ratio(one, seconds["base"]),
            "own_products_vs_floor": statistics.median(seconds["own products, 64 adapters"]) / floor,
            "own_products_share": ratio(seconds["own products, 64 adapters"], seconds["64 adapters"]),
        },
    }


def _adapters(base: ServingBase, recipes: list[Recipe]) -> list[ServedAdapter]:
    known: dict[str, Projections] = {}
    rng = np.random.default_rng(1)
    found = []
    for recipe in recipes:
        projections = known.get(recipe.id) or Projections(recipe, base.facts)
        known[recipe.id] = projections
        found.append(ServedAdapter(projections, rng.normal(0, DEVIATION, projections.size).astype(np.float32)))
    return found


def _own(base: ServingBase, adapters: list[ServedAdapter | None]) -> Any:
    """What the rows' own products take, over all layers."""
    rows, facts = AdaptedRows(adapters), base.facts
    x = {size: torch.rand(ROWS, LENGTH, size) for size in {facts.features(target)[0] for target in facts.linears}}
    y = {size: torch.zeros(ROWS, LENGTH, size) for size in {facts.features(target)[1] for target in facts.linears}}

    @torch.inference_mode()
    def call(number: int) -> None:
        for layer in range(facts.layers):
            for target in facts.linears:
                given, made = facts.features(target)
                rows.add((layer, target), x[given], y[made])

    return call


def _floor(base: ServingBase, adapter: ServedAdapter, base_seconds: float) -> float:
    """Seconds that the rows' own products cannot be faster than."""
    places, tokens = adapter.projections.places, ROWS * LENGTH
    linear = sum(a * b for a, b in map(base.facts.features, base.facts.linears)) * base.facts.layers
    rate = 2 * tokens * linear / base_seconds
    work = sum(2 * tokens * adapter.projections.rank * sum(base.facts.features(target)) for _, target in places)
    moved = ROWS * adapter.nbytes + 4 * tokens * sum(sum(base.facts.features(target)) for _, target in places)
    return max(work / rate, moved / read_bandwidth())


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
