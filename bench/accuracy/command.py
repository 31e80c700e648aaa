"""`bench accuracy`: accuracy of each training method at the same budget, as in the paper's accuracy tables.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA of SmolLM2-135M, in PyTorch, on the movie
reviews; and the number of queries. One step of any method is 32 sequences through the network, forward or back, so that
equal steps are equal compute; the number of examples seen differs.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.accuracy.precisions import precisions
from bench.accuracy.runs import Runner, Sizes, contender_of
from bench.programs import MOVIES, model_file
from bench.result import Claims, Measurement, Row
from bench.runner import JsonFile, Keep, Only, Quick, run_parts
from bench.training.learners import Engine
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


# By the name in claims: the contender's name, its engine, and q; q E = 16.
METHODS: dict[str, tuple[str, Engine, int]] = {  # the paper's Table 1
    "zero_shot": ("zero-shot", "none", 1),
    "fo_sgd_lora_fa": ("FO-SGD (LoRA-FA)", "first-order", 1),
    "mezo_lora_fa": ("MeZO (LoRA-FA)", "mezo", 1),
    "mobizo_q4": ("MobiZO q=4", "mobizo", 4),
    "mobizo_q16": ("MobiZO q=16", "mobizo", 16),
}
QUERIES: dict[str, tuple[str, Engine, int]] = {  # Table 16
    f"q{count}": (f"MobiZO q={count}", "mobizo", count) for count in (1, 2, 4, 8, 16)
}


def table(
    runner: Runner, budget: Budget, contenders: Mapping[str, tuple[str, Engine, int]], _quick: bool
) -> Measurement:
    """Returns the runs of all learning rates and of the best one's seeds, and the latter's accuracies in percent."""
    rows: list[Row] = []
    claims: Claims = {}
    for claim, (name, engine, queries) in contenders.items():
        if engine == "none":
            trials = runs = [runner.zero_shot()]
        else:
            contender = contender_of(name, engine, steps=budget.steps, interval=budget.interval, queries=queries)
            rates = budget.first_order_rates if engine == "first-order" else budget.rates
            runs, trials = runner.best_rate(contender, rates, budget.seeds)
        rows += [run.model_dump(mode="json") for run in (*trials, *runs[1:])]  # the first run is one of the trials
        claims |= {
            f"accuracy_movies_{claim}": 100 * statistics.mean(run.best or 0.0 for run in runs),
            f"final_accuracy_movies_{claim}": 100 * statistics.mean(run.final or 0.0 for run in runs),
        }
    return rows, claims


def accuracy(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None, only: Only = None) -> None:
    """Train and test every method on equal budgets: accuracy and its spread."""
    budget = QUICK_BUDGET if quick else BUDGET
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(str(model_file()), MOVIES, named_task("sst2"), budget.sizes, keep or Path(directory))
        parts = {
            "methods": partial(table, runner, budget, METHODS),
            "queries": partial(table, runner, budget, QUERIES),
            "precisions": partial(precisions, (keep or Path(directory)) / "precisions"),
        }
        run_parts(parts, json_file, quick, only)
