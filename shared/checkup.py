"""What a doctor looked at, of a device or of a server, and how it is told. Knows neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing looked at. remedy: what to do if it is not ok."""

    name: str
    state: State
    detail: str
    remedy: str = ""

    def line(self) -> str:
        """All of it for people."""
        return f"{self.state:4}  {self.name:9}  {self.detail}" + (f"; {self.remedy}" if self.remedy else "")
