"""The process that makes a run ready for the native runner: `python -m device_agent.preparation RUN_DIRECTORY`.

Reads the device's data, writes the plan, and ends, so that tokenizer and data take no memory while the runner trains.
Its only line on standard output is a `Message` if something is wrong. Imports no torch. Knows no HTTP.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from tokenizers import Tokenizer

from device_agent.data import read_splits
from device_agent.durable import write_pieces
from device_agent.errors import DoesNotFit
from device_agent.journal import Prepared, RunDirectory
from device_agent.messages import Message, describe
from device_agent.plan import dump_plan
from shared.canonical import file_sha256
from shared.errors import MobizoError


def prepare(run: RunDirectory) -> None:
    """Writes the run's plan. Raises MobizoError for data that cannot be used, OSError."""
    plan = run.plan()
    tokenizer = Tokenizer.from_file(str(plan.tokenizer))
    splits = read_splits(
        plan.dataset,
        plan.task,
        tokenizer,
        plan.manifest.recipe,
        plan.training,
        with_test=not plan.hands_in_last,
    )
    draws = None if plan.privacy is None else run.draws(plan, len(splits.train))
    write_pieces(run.native_plan, dump_plan(plan, splits, draws))
    run.note_prepared(
        Prepared(
            train_examples=len(splits.train),
            truncated_examples=splits.truncated,
            plan_sha256=file_sha256(run.native_plan),
        )
    )


def main() -> None:
    """Entry point."""
    try:
        prepare(RunDirectory(Path(sys.argv[1])))
    except MobizoError as error:
        _say(describe(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _say(describe(DoesNotFit("the disk is full; free some of it and the run goes on where it stopped")))


def _say(message: Message) -> None:
    sys.stdout.write(message.model_dump_json(exclude_none=True) + "\n")


if __name__ == "__main__":
    main()
