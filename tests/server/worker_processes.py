"""Worker processes for tests, forked from a process that has imported the worker, which takes two seconds of a CPU."""

import contextlib
import multiprocessing
import os
import sys
from datetime import timedelta

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["server.worker", "tests.server.worker_processes"])


def run(environment, log):
    """A worker with these settings in the environment; its log lines are added to a file."""
    from server import worker
    from server.tasks import queue

    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    queue.FIRST_BACKOFF = timedelta(0)
    worker.main()


@contextlib.contextmanager
def starter(home, log):
    """Starts worker processes, with other settings than the home's; all are killed at the end."""
    processes = []

    def start(**settings):
        environment = home.settings.model_copy(update=settings).environment()
        processes.append(CONTEXT.Process(target=run, args=(environment, log)))
        processes[-1].start()
        return processes[-1]

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        if log.exists():
            sys.stdout.write(log.read_text())  # shown if the test fails
