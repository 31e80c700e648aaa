"""`python -m server.tasks.parent_death_signal PARENT COMMAND...` runs a command that is killed when its parent dies.

A killed server thus leaves no workers behind, and a killed worker no compilers. This works on Linux only; on other
systems the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def bound_to_parent(command: list[str]) -> list[str]:
    """Returns `command` bound to this process. It must be started by a thread that lives as long as this process."""
    return [sys.executable, "-m", "server.tasks.parent_death_signal", str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Requests the signal and replaces this process with the command, which keeps the request."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the request.
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  # replaces this process on purpose


if __name__ == "__main__":
    main(sys.argv[1:])
