"""`bench feedback`: learning from preferences, on SmolLM2-135M-Instruct, by exact gradients in the native runner.

The pairs are made by rule from the product reviews. The prompt is a review and `Shop:`. The preferred answer is short
and polite, the rejected one long and rude; both quote the review's first words. Held-out pairs have other reviews and
other wordings, so that a style is learned and not a text. With loss kto each record has one of the two answers and a
label, in turn. The part `topics` is `bench/topics.py`.

`preferred` is the share of held-out records whose preferred answer has gained on the other one since the start, of
which it is half by chance. `seconds` is the run's whole time on the device, with the log-probabilities at the start and
all measurements; compiling the program is not part of it.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench.programs import PRODUCTS, CompiledProgram, compile_cold, smollm2_recipe
from bench.result import Claims, Row, notes, write
from bench.runner import JsonFile, Keep, Only, Quick, load_or_compute, select_parts
from bench.tiny import plan_of
from bench.topics import SETTINGS as TOPICS_SETTINGS
from bench.topics import measure_topics
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from shared.recipe import TARGETS
from shared.task import Task
from shared.training_settings import TrainingSettings

SEEDS = (0, 1, 2)
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
SETTINGS: dict[str, Any] = {
    "estimator": "gradient",
    "targets": TARGETS,
    "rank": 8,
    "layers": "last:8",
    "precision": "int8",
    "effective_batch": 8,
    "sequence_length": 80,
    "answer_length": 40,
    "choices": 2,
}
STEPS, LR = 24, 2e-3
TOPICS = "topics"


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


def feedback(json_file: JsonFile = None, quick: Quick = False, only: Only = None, keep: Keep = None) -> None:
    """Learn a style from preferences, and a second topic: held-out pairs, and what the adapter has lost."""
    rows: list[Row] = []
    claims: Claims = {}
    seeds = SEEDS[: 1 if quick else 3]
    with tempfile.TemporaryDirectory() as name:
        directory = keep or Path(name)
        data = write_pairs(directory / "pairs")
        for loss in select_parts(TASKS | {TOPICS: None}, only):
            if loss == TOPICS:
                program = compile_cold(smollm2_recipe(**TOPICS_SETTINGS), directory / TOPICS)
                topics = measure_topics(program, directory / "data", seeds, quick)
                rows, claims = rows + topics[0], claims | topics[1]
                continue
            program = compile_cold(smollm2_recipe(**SETTINGS, loss=loss), directory / loss)
            runs = [
                load_or_compute(directory / f"{loss}-{seed}.json", partial(_run, program, data, seed, quick))
                for seed in seeds
            ]
            rows += runs
            claims |= {
                f"{loss}_preferred": statistics.mean(row["preferred"] for row in runs),
                f"{loss}_liked_loss_increase": statistics.mean(row["liked_loss_increase"] for row in runs),
                f"{loss}_seconds": max(row["seconds"] for row in runs),
            }
    write(json_file, rows, claims)


def _run(program: CompiledProgram, data: Path, seed: int, quick: bool) -> Row:
    loss = program.recipe.loss
    training = TrainingSettings(
        steps=2 if quick else STEPS, lr=LR, seed=seed, schedule="cosine", evaluation_interval=STEPS // 2
    )
    with tempfile.TemporaryDirectory() as name:
        run = RunDirectory(Path(name) / "run")
        run.begin(plan_of(program, data, training, task=TASKS[loss]))
        result = train_run(run, RunnerLauncher(find_runner()), lambda _: None)
    before, after = result.token_loss_before or 1.0, result.token_loss_after or 1.0
    row = {
        "loss": loss,
        "seed": seed,
        "steps": result.steps,
        "best_step": result.best_step,
        "preferred": result.tuned_accuracy or 0.0,
        "margin": result.preference_margin or 0.0,
        "liked_loss_before": before,
        "liked_loss_increase": after / before - 1,
        "seconds": result.seconds,
        "train_seconds": result.train_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
    }
    notes.print(f"{loss}, seed {seed}: {row['preferred']:.1%} in {row['seconds']:.0f} s")
    return row
