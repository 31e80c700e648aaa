"""`python -m server.tether PARENT COMMAND...`: runs a command that the kernel kills when process PARENT dies.

So a server that was killed leaves no worker behind, and a worker no compiler. Linux only; elsewhere the command runs
untethered. Knows nothing of what it runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """`command` bound to this process. Start it from a thread that lives as long as this process does."""
    return [sys.executable, "-m", "server.tether", str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Becomes the command; the tether outlives that."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the tether held.
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  # becoming the command is the point


if __name__ == "__main__":
    main(sys.argv[1:])
