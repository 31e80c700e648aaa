"""`bench feedback`: learning from preferences, on SmolLM2-135M-Instruct, by exact gradients in the native runner.

The pairs are made by rule from the product reviews. The prompt is a review and `Shop:`. The preferred answer is short
and polite, the rejected one long and rude; both quote the review's first words. Held-out pairs have other reviews and
other wordings, so that a style is learned and not a text. With loss kto each record has one of the two answers and a
label, in turn. The part `step` times a step of loss dpo and a completion step on the same rows by turns, all layers
adapted, in the native runner. The parts `topics` and `start` are `bench/topics.py` and `bench/starts.py`.

`preferred` is the share of held-out records whose preferred answer has gained on the other one since the start, of
which it is half by chance. `seconds` is the run's whole time on the device, with the log-probabilities at the start and
all measurements; compiling the program is not part of it.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from bench.programs import LAST_LAYERS, PRODUCTS, Batch, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Measurement, Row
from bench.runner import JsonFile, Keep, Only, Quick, ratio, rows_of_seeds, run_parts, time_by_turns
from bench.starts import starts
from bench.tiny import plan_of, train
from bench.topics import topics
from device_agent.executors.program import Rates
from shared.task import Task
from shared.training_settings import TrainingSettings

SPLITS = {"train": 96, "validation": 16, "test": 60}  # records
WORDS = 6  # of a review that an answer quotes
POLITE = {
    True: (
        "Thank you for telling us: {quote}.",
        "We are sorry about this: {quote}.",
        "Thanks! We will look at this: {quote}.",
        "We are glad that you wrote: {quote}.",
    ),
    False: ("Many thanks for writing: {quote}.", "Please accept our apologies: {quote}."),
}
RUDE = {
    True: (
        "{quote}? Nobody asked you. Learn to read the manual before you waste our time with such nonsense again.",
        "{quote}? That is your own fault, and frankly we could not care less about what people like you think.",
        "{quote}? What a stupid thing to say. Stop complaining, shut up and buy something else if you hate it.",
        "{quote}? You clearly have no idea what you are doing, so do not blame us for your own silly mistakes.",
    ),
    False: (
        "{quote}? How dumb can anyone be. Go away, we have better things to do than to listen to your whining.",
        "{quote}? Who cares. It is ridiculous that you bother us with this, so leave us alone and grow up.",
    ),
}
TASKS = {
    "dpo": Task(name="style", kind="preference", prompt="Customer: {text}\nShop:"),
    "kto": Task(name="thumbs", kind="preference", prompt="Customer: {text}\nShop:", answer="{completion}"),
}
SETTINGS = LAST_LAYERS | {"sequence_length": 80, "answer_length": 40, "choices": 2}
STEPS, LR = 24, 2e-3
ROUNDS, QUICK_ROUNDS = 15, 1  # timed steps of each loss


def write_pairs(directory: Path) -> Path:
    """Writes the data set, whose records fit both tasks; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for split, count in SPLITS.items():
        source = PRODUCTS / ("test.jsonl" if split == "test" else "train.jsonl")
        skipped = SPLITS["train"] if split == "validation" else 0
        records = islice(_records(source, training=split == "train"), skipped, skipped + count)
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def _records(source: Path, *, training: bool) -> Iterator[Row]:
    polite, rude = POLITE[training], RUDE[training]
    for number, line in enumerate(source.read_text().splitlines()):
        words = json.loads(line)["text"].split()
        quote = " ".join(words[:WORDS]).rstrip(".,!?")
        chosen, rejected = (" " + each[number // 2 % len(each)].format(quote=quote) for each in (polite, rude))
        liked = number % 2 == 0
        completion = chosen if liked else rejected
        yield {"text": " ".join(words[:30])} | {
            "chosen": chosen,
            "rejected": rejected,
            "completion": completion,
            "label": liked,
        }


def preferences(loss: str, directory: Path, quick: bool) -> Measurement:
    """Returns the runs with a loss of preferences, and means of what they learned."""
    data = write_pairs(directory / "pairs")
    program = compile_cold(smollm2_recipe(**SETTINGS, loss=loss), directory / loss)
    rows = rows_of_seeds(directory / loss, quick, partial(_run, program, data))
    return rows, {
        f"{loss}_preferred": statistics.mean(row["preferred"] for row in rows),
        f"{loss}_liked_loss_increase": statistics.mean(row["liked_loss_increase"] for row in rows),
        f"{loss}_seconds": max(row["seconds"] for row in rows),
    }


def _run(program: CompiledProgram, data: Path, seed: int, quick: bool) -> Row:
    loss = program.recipe.loss
    training = TrainingSettings(
        steps=2 if quick else STEPS, lr=LR, seed=seed, schedule="cosine", evaluation_interval=STEPS // 2
    )
    with tempfile.TemporaryDirectory() as name:
        result = train(plan_of(program, data, training, task=TASKS[loss]), Path(name))
    before, after = result.token_loss_before or 1.0, result.token_loss_after or 1.0
    return {
        "loss": loss,
        "seed": seed,
        "preferred": result.tuned_accuracy or 0.0,
        "margin": result.preference_margin or 0.0,
        "liked_loss_increase": after / before - 1,
        "seconds": result.seconds,
    }


def preference_step(directory: Path, quick: bool) -> Measurement:
    """Returns no rows, and the ratios of time and peak memory of a step on rows of full length."""
    recipe = SETTINGS | {"layers": "all"}
    programs = {
        "dpo": compile_cold(smollm2_recipe(**recipe, loss="dpo"), directory / "step-dpo"),
        "completion": compile_cold(smollm2_recipe(**recipe, loss="full"), directory / "step-completion"),
    }
    runtimes = {name: program.serve() for name, program in programs.items()}

    def step(name: str, number: int) -> None:
        runtimes[name].gradient_step(_batch(programs[name], number), Rates(LR))

    seconds = time_by_turns(QUICK_ROUNDS if quick else ROUNDS, {name: partial(step, name) for name in programs})
    peaks = {name: runtime.usage().peak_rss_bytes for name, runtime in runtimes.items()}
    for runtime in runtimes.values():
        runtime.close()
    return [], {
        "step_dpo_over_completion": ratio(seconds["dpo"], seconds["completion"]),
        "step_memory_dpo_over_completion": peaks["dpo"] / peaks["completion"],
    }


def _batch(program: CompiledProgram, number: int) -> Batch:
    """Returns the inputs of a step on random rows of full length: each one a completion, or each two a pair."""
    recipe, rng = program.recipe, np.random.default_rng(number)
    rows, length, answer = recipe.effective_batch, recipe.sequence_length, recipe.answer_length
    texts = rng.integers(0, program.manifest.shape.vocabulary, (rows, length + 1))
    positions = np.tile(np.arange(length - answer, length), (rows, 1))
    batch = texts[:, :-1], positions, texts[:, -answer:], np.ones((rows, answer), np.float32)
    if recipe.loss != "dpo":
        return batch
    weights = np.tile(np.array([1, -1], np.float32), rows // 2)
    return *batch, np.zeros(rows, np.float32), weights, np.array([TrainingSettings().beta], np.float32)


PARTS: dict[str, Callable[[Path, bool], Measurement]] = {
    "dpo": partial(preferences, "dpo"),
    "kto": partial(preferences, "kto"),
    "topics": topics,
    "start": starts,
    "step": preference_step,
}


def feedback(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Learn a style from preferences, and a second topic; start from another adapter; time a step on pairs."""
    with tempfile.TemporaryDirectory() as name:
        parts = {part: partial(measure, keep or Path(name)) for part, measure in PARTS.items()}
        run_parts(parts, json_file, quick, only)
