"""The process that trains one run: `python -m device_agent.trainer_process RUN_DIRECTORY`.

Apart from the daemon, so that torch's memory goes back when a job is done and a crash of native code ends only the
run. It says what happens in JSON lines on standard output, one `Message` each, the last being result, error or
stopped; SIGTERM stops it after the call in progress; when its standard input ends, the daemon is dead and so is it.
Knows no HTTP.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from tokenizers import Tokenizer

from device_agent.data import read_splits
from device_agent.errors import DoesNotFit
from device_agent.journal import RunDirectory
from device_agent.messages import Message, describe
from device_agent.runtimes import open_runtime
from device_agent.trainer import Stopped, Trainer
from shared.errors import MobizoError
from shared.job import Progress

ORPHANED = 3  # exit status


def train(directory: Path, channel: BinaryIO) -> None:
    """Trains the run in `directory`, telling of it on `channel`."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def tell(message: Message) -> None:
        channel.write(message.model_dump_json(exclude_none=True).encode() + b"\n")
        channel.flush()

    run = RunDirectory(directory)
    with run.lock():
        try:
            tell(Message(progress=Progress(phase="loading")))
            plan = run.plan()
            # The tokenizer is let go before the program comes: the two need not fit memory at once.
            splits = read_splits(
                plan.dataset,
                plan.task,
                Tokenizer.from_file(str(plan.tokenizer)),
                plan.manifest.recipe,
                plan.training,
                with_test=not plan.hands_in_last,
            )
            runtime = open_runtime(plan.manifest, plan.program, plan.weights)
            trainer = Trainer(
                run, plan, splits, runtime, lambda progress: tell(Message(progress=progress)), stop.is_set
            )
            tell(Message(result=trainer.train()))
        except Stopped:
            tell(Message(stopped=True))
        except MobizoError as error:
            tell(describe(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            tell(describe(DoesNotFit("the disk is full; free some of it and the run goes on where it stopped")))


def _die_with_the_daemon() -> None:
    # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter shuts down.
    while os.read(0, 1):
        pass
    os._exit(ORPHANED)


def main() -> None:
    """Entry point. Standard output becomes the channel; whatever libraries print goes to standard error."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Ctrl-C reaches the whole group; the daemon decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_the_daemon, daemon=True).start()
    train(Path(sys.argv[1]), channel)


if __name__ == "__main__":
    main()
