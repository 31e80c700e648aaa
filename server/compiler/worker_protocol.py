"""What a child process is told by its worker, and its messages: one JSON object per line on standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

LOWERED = "MOBIZO_LOWERED_LAYERS"  # environment variable: directory of what earlier compilations lowered


class Lines:
    """Reserves standard output for the protocol; output of libraries is redirected to standard error."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, message: dict[str, Any]) -> None:
        """Sends one JSON object."""
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def stage(self, stage: str, fraction: float) -> None:
        """Reports the fraction done of a stage, 0 to 1."""
        self.say({"stage": stage, "fraction": fraction})
