"""What a run keeps while it is trained: the port that the trainer writes to. Knows no disk and no runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from device_agent.draws import Draws
from device_agent.journal import Figures, RunPlan
from shared.job import Result
from shared.lora import F32
from shared.trajectory import Ledger, Limits


class Run(Protocol):
    """One run's ledger, figures and files; see `RunDirectory`, which keeps them on disk."""

    @property
    def best(self) -> Path:
        """Names the adapter of the best validation."""

    @property
    def last(self) -> Path:
        """Names the adapter after the last step."""

    def begin_b(self, plan: RunPlan) -> F32:
        """B (D,) before the first step."""

    def draws(self, plan: RunPlan, examples: int) -> Draws:
        """What a private run on so many examples draws; the same whenever it is asked for."""

    def open_trajectory(self, plan: RunPlan) -> Ledger:
        """The ledger, continued or begun."""

    def limits(self) -> Limits:
        """How the run is to hold back from its next step on."""

    def figures(self) -> Figures:
        """What was noted last; zeros in a new run."""

    def note(self, figures: Figures) -> None:
        """Notes time and memory spent so far."""

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Keeps B (D,) after `step` steps as an adapter file under the name of `best` or `last`."""

    def finish(self, result: Result) -> None:
        """Notes that training is complete; both adapters are written."""
