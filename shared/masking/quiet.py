"""What a device of a masked round does not say beside its masked vector, as it would tell of its data or its update.

Knows no masks.
"""

from __future__ import annotations

from shared.canonical import sha256_hex
from shared.job import Progress, Result

NO_FILE = sha256_hex(b"")  # what a completion names in the place of a LoRA-B file, whose hash could be recognised


def quiet_result(result: Result) -> Result:
    """Steps, seconds and memory alone: no accuracies, losses or numbers of examples."""
    return Result(
        steps=result.steps,
        best_step=result.steps,
        train_seconds=result.train_seconds,
        seconds=result.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        train_examples=None,
        truncated_examples=None,
    )


def quiet_progress(progress: Progress) -> Progress:
    """The same without losses and accuracies."""
    return progress.model_copy(update={"loss": None, "accuracy": None, "best_accuracy": None})
