"""`bench accuracy`: accuracy of each training method at the same budget, as in the paper's accuracy tables.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA of SmolLM2-135M, in PyTorch, on the movie
reviews; and the number of queries. One step of any method is 32 sequences through the network, forward or back, so that
equal steps are equal compute; the number of examples seen differs. A run is validated on the way, and tested with the B
that was best there and with its last one.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.end_to_end.contender_runner import ContenderRunner
from bench.result import Claims, Row, write
from bench.runner import SEEDS, JsonFile, Keep, Quick
from bench.training.learners import Engine
from bench.training.runs import Contender, Run
from shared.recipe import RecipeSettings
from shared.training_settings import TrainingSettings

BATCH = 16  # q E
LENGTH = 256  # of a sequence; longer prompts lose their front
STEPS, INTERVAL, EPS = 72, 24, 1e-2
# Short runs need rates from the upper end of the paper's grid on.
RATES, FIRST_ORDER_RATES = (5e-4, 2e-3, 8e-3), (1e-2, 3e-2, 1e-1)
VALIDATED, TESTED = 100, 200  # sentences
QUICK_STEPS, QUICK_SENTENCES = 4, 16
# Engine and q by the name in claims: the paper's Table 1, and its Table 16.
CONTENDERS: dict[str, tuple[Engine, int]] = {
    "zero_shot": ("none", 1),
    "fo_sgd_lora_fa": ("first-order", 1),
    "mezo_lora_fa": ("mezo", 1),
    "mobizo_q4": ("mobizo", 4),
    "mobizo_q16": ("mobizo", 16),
    **{f"q{count}": ("mobizo", count) for count in (1, 2, 4, 8, 16)},
}


def accuracy(json_file: JsonFile = None, quick: Quick = False, keep: Keep = None) -> None:
    """Train and test every method on equal budgets: accuracy and its spread."""
    rows: list[Row] = []
    claims: Claims = {}
    with tempfile.TemporaryDirectory() as directory:
        runner = ContenderRunner(keep or Path(directory))
        for name, (engine, queries) in CONTENDERS.items():
            recipe = RecipeSettings(sequence_length=LENGTH, queries=queries, effective_batch=BATCH // queries)
            steps, interval = (QUICK_STEPS, QUICK_STEPS) if quick else (STEPS, INTERVAL)
            training = TrainingSettings(steps=steps, evaluation_interval=interval, eps=EPS)
            contender = Contender(name=name, engine=engine, recipe=recipe, training=training)
            trials, runs = _trials_and_runs(runner, contender, quick)
            rows += [run.model_dump(mode="json") for run in (*trials, *runs[1:])]  # the first run is one of the trials
            claims |= {
                f"accuracy_movies_{name}": 100 * statistics.mean(run.best or 0.0 for run in runs),
                f"final_accuracy_movies_{name}": 100 * statistics.mean(run.final or 0.0 for run in runs),
            }
    write(json_file, rows, claims)


def _trials_and_runs(runner: ContenderRunner, contender: Contender, quick: bool) -> tuple[list[Run], list[Run]]:
    """Returns the first seed's run of each rate, and the best rate's run of each seed."""
    sentences = (QUICK_SENTENCES, QUICK_SENTENCES) if quick else (VALIDATED, TESTED)
    rates: Sequence[float] = FIRST_ORDER_RATES if contender.engine == "first-order" else RATES
    seeds: Sequence[int] = SEEDS

    def run(rate: float, seed: int) -> Run:
        return runner.run_tested(contender.with_training(lr=rate, seed=seed), *sentences)

    if contender.engine == "none" or quick:
        rates, seeds = rates[:1], seeds[:1]
    trials = [run(rate, seeds[0]) for rate in rates]
    best = max(range(len(trials)), key=lambda index: trials[index].rank)
    return trials, [trials[best], *(run(rates[best], seed) for seed in seeds[1:])]
