"""The storage interface that the trainer writes a run to."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from device_agent.training.checkpoints import Checkpoints
from device_agent.training.dp_sampling import DPSamples
from device_agent.training.journal import ResourceUsage, RunPlan
from shared.job import Result
from shared.zo.lora import F32
from shared.zo.trajectory import Ledger, Limits


class RunStorage(Protocol):
    """One run's trajectory, usage and files; `RunDirectory` stores them on disk."""

    @property
    def best(self) -> Path:
        """Names the adapter with the best validation."""

    @property
    def last(self) -> Path:
        """Names the adapter after the last step."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of B and the optimizer's state, in a run with exact gradients."""

    def begin_b(self, plan: RunPlan) -> F32:
        """Returns B (D,) before the first step."""

    def dp_samples(self, plan: RunPlan, examples: int) -> DPSamples:
        """Returns the samples and noise of a private run; equal at every call."""

    def open_trajectory(self, plan: RunPlan) -> Ledger:
        """Opens or creates the trajectory."""

    def limits(self) -> Limits:
        """Returns the limits for the next step."""

    def figures(self) -> ResourceUsage:
        """Returns the recorded resource usage; zeros in a new run."""

    def note(self, figures: ResourceUsage) -> None:
        """Records the resource usage so far."""

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Writes B (D,) after `step` steps as an adapter file named `best` or `last`."""

    def finish(self, result: Result) -> None:
        """Records the result, after both adapters were written."""
