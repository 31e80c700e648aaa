"""Trains a run in its directory: reads the data, starts an executor for the program, and runs the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from tokenizers import Tokenizer

from device_agent.executors.process import Launcher
from device_agent.executors.program import TrainingProgram
from device_agent.memory import trim_heap
from device_agent.training.checkpointed_trainer import trainer_of
from device_agent.training.data import Splits, read_splits, sample, text_format_of
from device_agent.training.dp_sampling import check_sample_size
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from device_agent.training.start_measurements import StartMeasurements
from shared.errors import InvalidDataset
from shared.job import Progress
from shared.recipe import Recipe
from shared.result import Result
from shared.stop_signal import never
from shared.task import Task
from shared.tokenizer import read_tokenizer
from shared.zo.encoding import Example
from shared.zo.writing import Encoder, TextFormat

MAX_READ = 2_048  # tokens in the sequences of one measurement of reference texts
PIECES = 8  # of one text, so that an idle agent stays small
_REFERENCE_TASK = Task(name="reference", kind="text")


def train_run(
    run: RunDirectory,
    launcher: Launcher,
    report: Callable[[Progress], None],
    stop: Callable[[], bool] = never,
    rest: Callable[[], float] = lambda: 0.0,
    loaded: Callable[[], None] = lambda: None,
) -> Result:
    """Trains the run that `RunDirectory.begin` recorded, from where it is, to its result.

    report, stop, rest: as of `Trainer`. loaded: called once data and program are loaded, before the first step.
    Raises Stopped, InvalidDataset, InvalidTask, Diverged, OSError for a full disk, and what `launcher` and its
    executors raise.
    """
    with run.lock():
        report(Progress(phase="loading"))
        plan = run.plan()
        with ThreadPoolExecutor(1) as pool:  # the executor starts while the data are read
            reading = pool.submit(splits_of, run, plan)
            executor = launcher.launch(plan.manifest, plan.program, plan.weights, stop=stop)
        try:
            splits = reading.result()
            trim_heap()  # of the tokenizer, before the program's methods take their memory
            plan = plan.model_copy(update={"blank": splits.blank})
            loaded()
            program = TrainingProgram(plan.manifest, executor)
            directory = plan.measurements
            kept = None if directory is None else StartMeasurements(directory / launcher.name, plan)
            return trainer_of(plan.manifest)(run, plan, splits, program, report, stop, rest, kept=kept).train()
        finally:
            executor.close()


def splits_of(run: RunDirectory, plan: RunPlan) -> Splits:
    """Returns the run's examples, and records which records were left out."""
    tokenizer, recipe = read_tokenizer(plan.tokenizer.read_bytes()), plan.manifest.recipe
    splits = read_splits(
        plan.dataset,
        plan.task,
        tokenizer,
        recipe,
        plan.training,
        noise_key=plan.noise_key,
        with_test=not plan.uploads_last,
        text_format=text_format_of(plan.manifest, plan.job_created_at),
        earlier=plan.earlier,
        run=run,
    )
    run.record_unusable(splits.reasons)
    if plan.privacy is not None:
        check_sample_size(plan.privacy, splits.records)
    vocabulary, dynamic = plan.manifest.shape.vocabulary, plan.dynamic_length
    reference = reference_examples(plan.reference_texts, tokenizer, recipe, vocabulary, dynamic=dynamic)
    return replace(splits, reference=reference or None)


def reference_examples(
    texts: Sequence[str], tokenizer: Tokenizer, recipe: Recipe, vocabulary: int, *, dynamic: bool
) -> list[Example]:
    """Returns pieces of the reference texts as examples for a recipe's `score`; the same ones for the same texts.

    Their loss is measured at the start and at the end, so that an adapter which has lost general language is noticed.
    They are scored by loss `full`, the whole vocabulary, whatever the recipe's loss is.

    A piece has at most T tokens that count, and a text at most PIECES pieces. There are as many pieces as MAX_READ
    tokens have room for, at least one: the measurement takes about as long as a few steps. Texts with tokens that the
    base lacks are left out. vocabulary: rows of the embedding table. dynamic: sequences are only as long as the texts.
    """
    # Without the base's end token: whether a text has ended is a matter of its kind, and not of language.
    encoder = Encoder(
        _REFERENCE_TASK, tokenizer, recipe.model_copy(update={"loss": "full"}), TextFormat(vocabulary=vocabulary)
    )
    pieces: list[Example] = []
    for number, text in enumerate(texts, 1):
        with suppress(InvalidDataset):
            pieces += sample(encoder.encode({"text": text}, f"reference text {number}"), PIECES)
    length = max((piece.length for piece in pieces), default=1) if dynamic else recipe.sequence_length
    return list(sample(pieces, max(MAX_READ // length, 1)))
