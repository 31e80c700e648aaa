"""The part `precisions` of `bench step`: exact gradients on 8 and on 4 bits, as the agent trains them.

The demo's recipe on the movie reviews, in the native runner with its file of packed weights. Steps are timed by turns;
the memory is that of whole runs, evaluations included, and of a short one that packs weights in memory.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

from bench.programs import LAST_LAYERS, LR, MOVIES, CompiledProgram, compile_cold, random_batch, smollm2_recipe
from bench.result import Measurement, Row
from bench.runner import SEEDS, ratio, rows_of_seeds, time_by_turns
from bench.tiny import plan_of, train
from device_agent.executors.program import Rates, TrainingProgram
from shared.recipe import Precision
from shared.training_settings import TrainingSettings

PRECISIONS: tuple[Precision, ...] = ("int8", "int4")
SETTINGS = LAST_LAYERS | {"layers": "last:12", "effective_batch": 4, "sequence_length": 36}
STEPS, ROUNDS = 80, 12


def precisions(quick: bool) -> Measurement:
    """Returns a row of each run, and claims."""
    with tempfile.TemporaryDirectory() as name:
        directory, rows = Path(name), list[Row]()
        programs = {
            precision: compile_cold(smollm2_recipe(**SETTINGS | {"precision": precision}), directory / precision)
            for precision in PRECISIONS
        }
        opened = {precision: program.serve() for precision, program in programs.items()}
        steps = {str(precision): partial(_step, program, opened[precision]) for precision, program in programs.items()}
        seconds = time_by_turns(2 if quick else ROUNDS, steps)
        for each in opened.values():
            each.close()
        for precision, program in programs.items():
            rows += rows_of_seeds(directory / f"run-{precision}", quick, partial(_run, program, directory))
            program.path("weights").with_name("weights.ptd.packed").unlink()
            program.path("weights").with_name("weights.ptd.packed").mkdir()  # no file: packed in memory
        in_memory = {
            precision: _run(program, directory, len(SEEDS), quick=True)["peak_rss_bytes"]
            for precision, program in programs.items()
        }
    claims = {
        "gradient_int4_step_ratio": 1 / ratio(seconds["int8"], seconds["int4"]),
        "gradient_int4_peak_ratio_in_memory": in_memory["int4"] / in_memory["int8"],
    }
    for precision, program in programs.items():
        own = [row for row in rows if row["precision"] == precision]
        claims |= {
            f"gradient_accuracy_{precision}": statistics.mean(row["accuracy"] for row in own),
            f"gradient_peak_bytes_{precision}": statistics.mean(row["peak_rss_bytes"] for row in own),
            f"gradient_file_bytes_{precision}": program.size("program") + program.size("weights"),
        }
    return rows, claims


def _step(program: CompiledProgram, opened: TrainingProgram, number: int) -> None:
    recipe, vocabulary = program.recipe, program.manifest.shape.vocabulary
    opened.gradient_step(random_batch(recipe, vocabulary, recipe.sequence_length, number), Rates(LR))


def _run(program: CompiledProgram, directory: Path, seed: int, quick: bool) -> Row:
    precision = program.recipe.precision
    steps = 2 if quick else STEPS
    training = TrainingSettings(
        steps=steps,
        lr=3 * LR,
        schedule="cosine",
        seed=seed,
        evaluation_interval=steps // 2,
        validation_limit=8 if quick else 100,
        test_limit=8 if quick else None,
    )
    result = train(plan_of(program, MOVIES, training), directory / f"{precision}-{seed}")
    return {
        "precision": precision,
        "seed": seed,
        "accuracy": result.tuned_accuracy,
        "peak_rss_bytes": result.peak_rss_bytes,
        "train_seconds": result.train_seconds,
    }
