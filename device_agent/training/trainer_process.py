"""The process that trains one run: `python -m device_agent.training.trainer_process RUN_DIRECTORY`.

A separate process returns torch's memory after the job and contains crashes of native code. It prints `TrainerMessage`
lines on standard output, the last one being result, error or stopped. SIGTERM stops it after the current call; it exits
when its standard input is closed, because the daemon is then dead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer

from device_agent.durable import disk_full_as_does_not_fit
from device_agent.runtimes import open_runtime
from device_agent.training.data import read_splits, text_format_of
from device_agent.training.dp_sampling import check_sample_size
from device_agent.training.gradient_trainer import trainer_of
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage, describe
from device_agent.training.trainer import Stopped
from shared.errors import MobizoError
from shared.job import Progress
from shared.stop_signal import StopSignal

ORPHANED = 3  # exit status


def train(directory: Path, channel: BinaryIO) -> None:
    """Trains the run in `directory` and writes messages to `channel`."""
    stop = StopSignal()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def send(message: TrainerMessage) -> None:
        channel.write(message.model_dump_json(exclude_none=True).encode() + b"\n")
        channel.flush()

    run = RunDirectory(directory)
    with run.lock():
        try:
            with disk_full_as_does_not_fit():
                send(TrainerMessage(progress=Progress(phase="loading")))
                plan = run.plan()
                # The tokenizer is let go before the program comes: the two need not fit memory at once.
                splits = read_splits(
                    plan.dataset,
                    plan.task,
                    Tokenizer.from_file(str(plan.tokenizer)),
                    plan.manifest.recipe,
                    plan.training,
                    noise_key=plan.noise_key,
                    with_test=not plan.uploads_last,
                    text_format=text_format_of(plan.manifest),
                )
                run.record_unusable(splits.reasons)
                if plan.privacy is not None:
                    check_sample_size(plan.privacy, splits.counts.records)
                plan = splits.plan(plan)
                runtime = open_runtime(plan.manifest, plan.program, plan.weights)
                trainer = trainer_of(plan.manifest)(
                    run, plan, splits, runtime, lambda progress: send(TrainerMessage(progress=progress)), stop.is_set
                )
                send(TrainerMessage(result=trainer.train()))
        except Stopped:
            send(TrainerMessage(stopped=True))
        except MobizoError as error:
            send(describe(error))


def _die_with_the_daemon() -> None:
    # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter shuts down.
    while os.read(0, 1):
        pass
    os._exit(ORPHANED)


def main() -> None:
    """Entry point. Messages go to the original standard output; output of libraries goes to standard error."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Ctrl-C reaches the whole group; the daemon decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_the_daemon, daemon=True).start()
    train(Path(sys.argv[1]), channel)


if __name__ == "__main__":
    main()
