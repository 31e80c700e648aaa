"""Child processes that are killed when their parent dies: a killed server leaves no workers and compilers behind.

`python -m server.tasks.child_process PARENT COMMAND...` runs such a command. This works on Linux only; on other systems
the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# A task computes in Python for the most part. Threads of its libraries would mostly wait for each other, which takes
# processor time from other workers; on a machine with idle cores, more workers help. An operator's own setting wins.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Stopped(Exception):
    """A task was stopped before it ended: not an error, and not counted as an attempt."""


def bound_to_parent(command: list[str]) -> list[str]:
    """Returns `command` bound to this process. It must be started by a thread that lives as long as this process."""
    return [sys.executable, "-m", "server.tasks.child_process", str(os.getpid()), *command]


def die_with_parent(parent: int) -> None:
    """Has the system kill this process when its parent, a process id, dies. Exits if the parent has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(arguments: list[str]) -> None:
    """Replaces this process with the command."""
    parent, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent)
    os.execvp(command[0], command)  # noqa: S606  # replaces this process on purpose


if __name__ == "__main__":
    main(sys.argv[1:])
