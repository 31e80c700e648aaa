"""The result of one `doctor` check, of a device or a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One check. remedy: what to do if the state is not ok."""

    name: str
    state: State
    detail: str
    remedy: str = ""

    def line(self) -> str:
        """Returns the check as one line of text."""
        return f"{self.state:4}  {self.name:9}  {self.detail}" + (f"; {self.remedy}" if self.remedy else "")
