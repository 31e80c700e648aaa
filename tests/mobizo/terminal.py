"""Runs the `mobizo` command in a process of its own, on a pseudo-terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from contextlib import suppress

SILENCE_LIMIT = 60  # seconds; then the command is killed
PROGRAM = "from mobizo.cli import main; main()"


def on_terminal(*arguments, input_lines="", columns=80):
    """Returns exit status and what the terminal shows, without colors. input_lines: one line for each prompt."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *(str(argument) for argument in arguments)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=env | {"TERM": "xterm"},
        start_new_session=True,
    ) as process:
        os.close(follower)
        screen, lines = b"", input_lines.splitlines()
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while select.select([leader], [], [], SILENCE_LIMIT)[0]:
                screen += os.read(leader, 4096)
                if lines and screen.endswith(b": "):  # a hidden prompt prints its last space when the echo is off
                    os.write(leader, lines.pop(0).encode() + b"\n")
        os.close(leader)
        try:
            process.wait(SILENCE_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode()).replace("\r\n", "\n")
