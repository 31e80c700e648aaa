"""What a child process says to its worker: one JSON object a line, on standard output alone."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Lines:
    """Standard output for this protocol alone; what libraries print goes to standard error."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, message: dict[str, Any]) -> None:
        """Sends one object."""
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def stage(self, stage: str, fraction: float) -> None:
        """Says how far a stage is, from 0 to 1."""
        self.say({"stage": stage, "fraction": fraction})
