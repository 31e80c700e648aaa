"""`bench accuracy`: accuracy of each training method at the same budget, as in the paper's accuracy tables.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA of SmolLM2-135M, in PyTorch, on the movie
reviews; and the number of queries. One step of any method is 32 sequences through the network, forward or back, so that
equal steps are equal compute; the number of examples seen differs.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.accuracy.runs import Runner, Sizes, contender_of
from bench.programs import MOVIES, model_file
from bench.result import Measurement, Row
from bench.runner import JsonFile, Keep, Only, Quick, run_parts
from bench.training.learners import Engine
from bench.training.runs import Run
from shared.task_templates import named_task


@dataclass(frozen=True)
class Budget:
    """How much is run. interval: steps between validations. rates: learning rates to try, of first order apart."""

    sizes: Sizes
    seeds: tuple[int, ...]
    steps: int
    interval: int
    rates: tuple[float, ...]
    first_order_rates: tuple[float, ...]


QUICK_BUDGET = Budget(Sizes(1000, 16, 48), (0,), 4, 4, (2e-3,), (3e-2,))
# Short runs need rates from the upper end of the paper's grid on.
BUDGET = Budget(Sizes(1000, 100, 200), (0, 1, 2), 72, 24, (5e-4, 2e-3, 8e-3), (1e-2, 3e-2, 1e-1))


class Tables:
    """Runs the contenders of a table and collects rows and claims, accuracies in percent."""

    def __init__(self, runner: Runner, budget: Budget) -> None:
        self._runner, self._budget = runner, budget

    def methods(self) -> Measurement:
        """Compares all methods at q E = 16 (the paper's Table 1)."""
        zero_shot = self._runner.zero_shot()
        tables = [([zero_shot], _claims("zero_shot", [zero_shot]))]
        tables.append(self._measure("FO-SGD (LoRA-FA)", "fo_sgd_lora_fa", "first-order"))
        tables.append(self._measure("MeZO (LoRA-FA)", "mezo_lora_fa", "mezo"))
        tables += [self._measure(f"MobiZO q={count}", f"mobizo_q{count}", "mobizo", count) for count in (4, 16)]
        return _join(tables)

    def queries(self) -> Measurement:
        """Compares numbers of queries at fixed q E (Table 16)."""
        counts = (1, 2, 4, 8, 16)
        return _join([self._measure(f"MobiZO q={count}", f"q{count}", "mobizo", count) for count in counts])

    def _measure(self, name: str, claim: str, engine: Engine, queries: int = 1) -> tuple[list[Run], dict[str, float]]:
        """Returns the runs of the learning rates and of the best one's seeds, and the claims of the latter."""
        budget = self._budget
        contender = contender_of(name, engine, steps=budget.steps, interval=budget.interval, queries=queries)
        rates = budget.first_order_rates if engine == "first-order" else budget.rates
        _, runs, trials = self._runner.best_rate(contender, rates, budget.seeds)
        return [*trials, *runs[1:]], _claims(claim, runs)  # the first run is one of the trials


def _claims(name: str, runs: Sequence[Run]) -> dict[str, float]:
    return {
        f"accuracy_movies_{name}": 100 * statistics.mean(run.best or 0.0 for run in runs),
        f"final_accuracy_movies_{name}": 100 * statistics.mean(run.final or 0.0 for run in runs),
    }


def _join(tables: Sequence[tuple[list[Run], dict[str, float]]]) -> Measurement:
    rows: list[Row] = [run.model_dump(mode="json") for runs, _ in tables for run in runs]
    return rows, {name: value for _, claims in tables for name, value in claims.items()}


def accuracy(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None, only: Only = None) -> None:
    """Train and test every method on equal budgets: accuracy and its spread."""
    budget = QUICK_BUDGET if quick else BUDGET
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(str(model_file()), MOVIES, named_task("sst2"), budget.sizes, keep or Path(directory))
        tables = Tables(runner, budget)
        parts = {"methods": lambda _quick: tables.methods(), "queries": lambda _quick: tables.queries()}
        run_parts(parts, json_file, quick, only)
