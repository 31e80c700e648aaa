"""Prepares a run for the native runner: `python -m device_agent.training.preparation RUN_DIRECTORY`.

Reads the device's data, writes the native plan and exits, so that tokenizer and data use no memory during training.
Prints a `TrainerMessage` on standard output only in case of an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer

from device_agent.durable import disk_full_as_does_not_fit, write_pieces
from device_agent.training.data import read_splits
from device_agent.training.dp_sampling import check_sample_size
from device_agent.training.journal import PreparedData, RunDirectory
from device_agent.training.messages import describe
from device_agent.training.plan import dump_plan
from shared.canonical import file_sha256
from shared.errors import MobizoError


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
        with_test=not plan.uploads_last,
    )
    run.note_unusable(splits.reasons)
    if plan.privacy is not None:
        check_sample_size(plan.privacy, splits.counts.records)
    dp_samples = None if plan.privacy is None else run.dp_samples(plan, len(splits.train))
    write_pieces(run.native_plan, dump_plan(plan, splits, dp_samples))
    run.note_prepared(
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
