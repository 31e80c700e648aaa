"""The parts of `bench accuracy`: which contenders each compares, with which budget, and the claims."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.accuracy.runs import Point, Runner, Sizes
from bench.baselines.peft_adapters import VARIANTS
from bench.result import Claims, Row
from bench.training.runs import Contender, Run
from server.compiler.model.quantization import check_precision
from shared.errors import InvalidRecipe
from shared.recipe import Precision

PARTS = ("main", "queries", "precision", "variants")  # methods of Parts
ZERO, FIRST_ORDER, MEZO = "zero-shot", "FO-SGD (LoRA-FA)", "MeZO (LoRA-FA)"
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-weight", "int4", "int4-weight")


@dataclass(frozen=True)
class Budget:
    """How much is run. Grids: learning rates of first order and of zeroth order."""

    sizes: Sizes
    seeds: tuple[int, ...]
    steps: int
    interval: int
    steps_first_order: int
    interval_first_order: int
    steps_variants: int
    grid: tuple[float, ...]
    grid_first_order: tuple[float, ...]
    grid_variants: tuple[float, ...]
    eps_variants: tuple[float, ...] = (1e-2,)
    vera_rank: int = 256


PLAIN = Budget(
    sizes=Sizes(1000, 100, 200),
    seeds=(0, 1, 2),
    steps=72,
    interval=24,
    steps_first_order=72,
    interval_first_order=24,
    steps_variants=72,
    # Short runs need rates from the upper end of the paper's grid on.
    grid=(5e-4, 2e-3, 8e-3),
    grid_first_order=(1e-2, 3e-2, 1e-1),
    grid_variants=(5e-4, 2e-3, 8e-3, 3e-2),
)
QUICK = replace(
    PLAIN,
    sizes=Sizes(1000, 16, 48),
    seeds=(0,),
    steps=4,
    interval=4,
    steps_first_order=4,
    interval_first_order=4,
    steps_variants=4,
    grid=(2e-3,),
    grid_first_order=(3e-2,),
    grid_variants=(2e-3,),
)
FULL = Budget(  # the paper's Table 9 and training procedure
    sizes=Sizes(1000, 500, 1000),
    seeds=(0, 1, 2),
    steps=20_000,
    interval=500,
    steps_first_order=1000,
    interval_first_order=100,
    steps_variants=10_000,
    grid=(5e-4, 1e-4, 5e-5, 1e-5),
    grid_first_order=(5e-3, 1e-3, 5e-4),
    grid_variants=(5e-6, 5e-5, 5e-4, 5e-3),
    eps_variants=(1e-3, 1e-2),
    vera_rank=1024,
)


class Parts:
    """Runs the parts of the benchmark on one task and collects rows and claims, accuracies in percent."""

    def __init__(self, runner: Runner, budget: Budget) -> None:
        self.runner, self.budget = runner, budget
        self.rows: list[Row] = []
        self.claims: Claims = {}

    def main(self) -> None:
        """Compares all methods at q E = 16 (the paper's Table 1 and Tables 10 to 13)."""
        budget = self.budget
        self._record([self.runner.zero_shot()], ZERO)
        steps, interval = budget.steps_first_order, budget.interval_first_order
        first_order = self.runner.setting.contender(FIRST_ORDER, "first-order", steps, interval)
        self._contend(first_order, FIRST_ORDER, budget.grid_first_order)
        for contender in (self._zeroth(MEZO, "mezo"), self._mobizo(4), self._mobizo(16)):
            self._contend(contender, contender.name)

    def queries(self) -> None:
        """Compares numbers of queries at fixed q E (Table 16)."""
        for queries in (1, 2, 4, 8, 16):
            self._contend(self._mobizo(queries), f"q{queries}")

    def precision(self) -> None:
        """Compares frozen weights of fewer bits (Table 14).

        Weights are rounded by the compiler's quantizers and turned back: as in the paper, and unlike in programs of
        int8 and int4, activations are not quantized. The file of the shipped base holds 4-bit weights already, so
        rounding them again may cost less than it would for a float model.
        """
        for precision in PRECISIONS:
            try:
                check_precision(precision, self.runner.shape)
            except InvalidRecipe:  # the layers' inputs do not divide into the precision's groups
                continue
            self._record([self.runner.zero_shot(precision)], None)
            for queries in (4, 16):
                contender = self._mobizo(queries, precision)
                self._contend(contender, f"{contender.name} {precision}")

    def variants(self) -> None:
        """Compares adapters from `peft` under MeZO (Table 5)."""
        budget = self.budget
        for variant in VARIANTS:
            contender = self.runner.setting.contender(
                *(variant, "mezo", budget.steps_variants, budget.interval),
                variant=variant,
                vera_rank=budget.vera_rank if variant == "vera" else 0,
            )
            self._contend(contender, f"variant {variant}", budget.grid_variants, budget.eps_variants)

    def _zeroth(self, name: str, engine: str, **fields: Any) -> Contender:
        return self.runner.setting.contender(name, engine, self.budget.steps, self.budget.interval, **fields)

    def _mobizo(self, queries: int, precision: Precision = "fp32") -> Contender:
        return self._zeroth(f"MobiZO q={queries}", "mobizo", queries=queries, precision=precision)

    def _contend(
        self, contender: Contender, claim: str, rates: Sequence[float] | None = None, scales: Sequence[float] = (1e-2,)
    ) -> None:
        grid = [Point(lr, eps) for eps in scales for lr in rates or self.budget.grid]
        _, runs, tried = self.runner.chosen(contender, grid, self.budget.seeds)
        self._record(tried, None)
        self._record(runs, claim)

    def _record(self, runs: Sequence[Run], claim: str | None) -> None:
        """Adds a row for each new run, and the claims of their means; parts share runs."""
        for run in runs:
            row = run.model_dump(mode="json")
            if row not in self.rows:
                self.rows.append(row)
        if claim is not None:
            key = f"{self.runner.data.name} {claim}".lower().translate(str.maketrans(" -", "__", "=()"))
            self.claims[f"accuracy_{key}"] = 100 * statistics.mean(run.best or 0.0 for run in runs)
            self.claims[f"final_accuracy_{key}"] = 100 * statistics.mean(run.final or 0.0 for run in runs)
