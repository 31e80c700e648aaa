"""Reduces the metrics of a device in a secure aggregation round to those that reveal nothing about its data."""

from __future__ import annotations

from shared.canonical import sha256_hex
from shared.job import Progress
from shared.result import Result

NO_FILE = sha256_hex(b"")  # replaces the LoRA-B file's hash, which could be recognized, in a completion


def redacted_result(result: Result) -> Result:
    """Returns steps, times and memory only, without accuracies, losses or numbers of examples."""
    return Result(
        steps=result.steps,
        best_step=result.steps,
        train_seconds=result.train_seconds,
        seconds=result.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        train_examples=None,
        truncated_examples=None,
        unusable_examples=None,
    )


def redacted_progress(progress: Progress) -> Progress:
    """Returns the progress without losses and accuracies."""
    hidden = ("loss", "accuracy", "best_accuracy", "validation_loss")
    return progress.model_copy(update=dict.fromkeys(hidden))
