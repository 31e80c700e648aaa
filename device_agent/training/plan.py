"""The native runner's plan of a run: every batch is already tokens, every seed and learning rate already a number.

`python -m device_agent.training.plan RUN_DIRECTORY` reads the device's data, writes the plan and exits, so that
tokenizer and data use no memory during training. It prints a `TrainerMessage` on standard output only on an error.

File: b"MOBIZO-PLAN 4\\n", then frames as the trajectory's (`shared.zo.trajectory`), little-endian, integers int32
unless said otherwise. T steps, q queries, E examples a step, A answer positions, C choices, R score rows:

    C   settings: 17 int64 in the order of `_settings`, then eps as float64
    H   the ledger's header, as it is written there
    B   float32 (D,) from which the run starts; absent if it starts from 0
    P   factor of B's distance from that start after each step, float32 (T,); absent without pulls
    K   empty: B after the last step is uploaded, not the one with the best validation; absent otherwise
    L   learning rate of each step, float32 (T,)
    Q   seeds (T, q, 2)          O   examples of each step (T, E), of a private run as many as D says
    M   steps between checkpoints of B and the optimizer's state; absent if the program has no `state`
    G   a run with estimator `gradient`: float32 bound of the gradient's norm (infinity: no clipping) and weight decay;
        absent with every other estimator; comes before D
    D   draws of a private run: clip float32, count of examples of each step (T,), noise float32 (T, q); comes before O.
        Of a run with exact gradients, the noise multiplier float32 and keys (T, 4, 2) in place of the noise
    X   a training example: count n, tokens at the front that are never cut; tokens (n,), positions (A,); then answers
        (A,), or choices (A, C) and choice mask float32 (A, C) where the loss is over candidates; mask float32 (A,)
    V   a batch of `score` from the validation split: length S; tokens (R, S), positions (R, A), choices (R, A, C);
        count of examples, and for each its place in the split, the right candidate, the count of candidates, and for
        each candidate the count of its cells and the cells (row, position, choice)
    T   the same from the test split
    Z   the end; its number counts the frames before it
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from device_agent.durable import disk_full_as_does_not_fit, write_pieces
from device_agent.training.checkpoints import CHECKPOINT_STEPS
from device_agent.training.data import BatchSampler, Splits, read_splits, text_format_of
from device_agent.training.dp_sampling import DPSamples, check_sample_size
from device_agent.training.evaluation import score_batches
from device_agent.training.journal import PreparedData, RunDirectory, RunPlan
from device_agent.training.messages import describe
from device_agent.training.prefix import MOST_BYTES, STRIDE
from shared.canonical import file_sha256
from shared.errors import MobizoError
from shared.privacy import ExamplePrivacy
from shared.recipe import Recipe
from shared.zo.encoding import Example, pack_step
from shared.zo.noise import run_seeds
from shared.zo.trajectory import frame

MAGIC = b"MOBIZO-PLAN 4\n"
I32 = NDArray[np.int32]


def dump_plan(plan: RunPlan, splits: Splits, dp_samples: DPSamples | None = None) -> Iterator[bytes]:
    """Yields the file's frames. dp_samples: for a private run."""
    yield MAGIC
    count = 0
    for kind, payload in _records(plan, splits, dp_samples):
        yield frame(kind, count, payload)
        count += 1
    yield frame(b"Z", count, b"")


def _records(plan: RunPlan, splits: Splits, dp_samples: DPSamples | None) -> Iterator[tuple[bytes, bytes]]:
    recipe, settings = plan.manifest.recipe, plan.training
    steps = range(settings.steps)
    yield b"C", _settings(plan)
    yield b"H", plan.header.model_dump_json().encode()
    if plan.start is not None:
        yield b"B", plan.begin_b().astype("<f4").tobytes()
    if plan.half.pulls:
        yield b"P", np.array([plan.half.pull_factor([settings.lr_at(step)]) for step in steps], "<f4").tobytes()
    if plan.uploads_last:
        yield b"K", b""
    yield b"L", np.array([plan.lr_at(step) for step in steps], "<f4").tobytes()
    yield b"Q", run_seeds(settings.seed, settings.steps, recipe.queries).astype("<i4").tobytes()
    if "state" in plan.manifest.methods:
        yield b"M", _integers((CHECKPOINT_STEPS,))
    if recipe.estimator == "gradient":
        rates = settings.max_norm if settings.max_norm is not None else np.inf, settings.weight_decay
        yield b"G", struct.pack("<ff", *rates)
    if dp_samples is not None and plan.privacy is not None:
        yield b"D", _secret_samples(recipe, plan.privacy, dp_samples)
        yield b"O", dp_samples.order.astype("<i4").tobytes()
    else:
        order = BatchSampler(settings.seed, tuple(example.correct for example in splits.train), recipe.effective_batch)
        yield b"O", b"".join(_integers(order.indices(step)) for step in steps)
    for example in splits.train:
        yield b"X", _example(plan, example)
    if plan.privacy is not None:
        return  # nothing is measured
    yield from ((b"V", batch) for batch in _scores(plan, splits.validation))
    yield from ((b"T", batch) for batch in _scores(plan, splits.test or ()))


def _settings(plan: RunPlan) -> bytes:
    recipe, settings, manifest = plan.manifest.recipe, plan.training, plan.manifest
    numbers = (
        settings.steps,
        settings.evaluation_interval,
        recipe.queries,
        recipe.effective_batch,
        recipe.sequence_length,
        recipe.answer_length,
        recipe.choices,
        recipe.score_rows,
        manifest.size,
        plan.dynamic_length,
        recipe.loss == "candidates",
        recipe.estimator == "stored",
        manifest.shape.hidden if "suffix" in manifest.methods else 0,
        STRIDE,
        MOST_BYTES,
        manifest.shape.vocabulary,
        settings.patience or 0,
    )
    return struct.pack("<17qd", *map(int, numbers), settings.eps_for(recipe))


def _secret_samples(recipe: Recipe, privacy: ExamplePrivacy, samples: DPSamples) -> bytes:
    head = np.array([privacy.clip], "<f4").tobytes() + samples.counts.astype("<i4").tobytes()
    if recipe.noised_scalars is not None:
        return head + samples.noise.astype("<f4").tobytes()
    return head + np.array([privacy.sigma], "<f4").tobytes() + samples.keys.astype("<i4").tobytes()


def _example(plan: RunPlan, example: Example) -> bytes:
    """Encodes row 0 of the example packed alone, so that packing is implemented once."""
    recipe = plan.manifest.recipe
    row = example.correct_row
    _, *labels = pack_step([example], recipe)
    pieces = [_integers((len(row.tokens), example.bos_length)), _integers(row.tokens)]
    for array in labels:
        kind = "<f4" if array.dtype == np.float32 else "<i4"
        pieces.append(array[0].astype(kind).tobytes())
    return b"".join(pieces)


def _scores(plan: RunPlan, examples: Sequence[Example]) -> Iterator[bytes]:
    if not examples:
        return
    for indices, batch in score_batches(examples, plan.manifest.recipe, dynamic=plan.manifest.dynamic_length):
        pieces = [_integers((batch.inputs[0].shape[1],)), *(array.astype("<i4").tobytes() for array in batch.inputs)]
        pieces.append(_integers((len(indices),)))
        for index, candidates in zip(indices, batch.cells, strict=True):
            pieces.append(_integers((index, examples[index].correct, len(candidates))))
            for cells in candidates:
                pieces.append(_integers((len(cells), *(number for cell in cells for number in cell))))
        yield b"".join(pieces)


def _integers(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def prepare(run: RunDirectory) -> None:
    """Writes the run's native plan. Raises MobizoError for unusable data, OSError."""
    plan = run.plan()
    tokenizer = Tokenizer.from_file(str(plan.tokenizer))
    splits = read_splits(
        plan.dataset,
        plan.task,
        tokenizer,
        plan.manifest.recipe,
        plan.training,
        noise_key=plan.noise_key,
        with_test=not plan.uploads_last,
        text_format=text_format_of(plan.manifest),
    )
    run.record_unusable(splits.reasons)
    if plan.privacy is not None:
        check_sample_size(plan.privacy, splits.counts.records)
    dp_samples = None if plan.privacy is None else run.dp_samples(plan, len(splits.train))
    write_pieces(run.native_plan, dump_plan(splits.plan(plan), splits, dp_samples))
    run.record_prepared(
        PreparedData(
            examples=splits.counts,
            plan_sha256=file_sha256(run.native_plan),
        )
    )


def main() -> None:
    """Entry point."""
    try:
        with disk_full_as_does_not_fit():
            prepare(RunDirectory(Path(sys.argv[1])))
    except MobizoError as error:
        sys.stdout.write(describe(error).model_dump_json(exclude_none=True) + "\n")


if __name__ == "__main__":
    main()
