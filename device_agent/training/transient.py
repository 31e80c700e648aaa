"""A run in memory, for the virtual devices of a simulation; its ledger and adapter files equal a run directory's
bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

from device_agent.training.checkpoints import Checkpoints
from device_agent.training.dp_sampling import DPSamples, draw
from device_agent.training.journal import ResourceUsage, RunPlan, run_adapter
from shared.entropy import Entropy
from shared.job import Result
from shared.zo.lora import F32
from shared.zo.trajectory import Ledger, Limits


class InMemoryRun:
    """A run that is trained in one go; see `device_agent.training.trainer.RunStorage`."""

    best = Path("best.safetensors")
    last = Path("last.safetensors")

    def __init__(self, start: F32, entropy: Entropy = os.urandom) -> None:
        """start: B (D,) before the first step. entropy: randomness of a private run, which a simulation may fix."""
        self._start, self._entropy = start, entropy
        self.files: dict[Path, bytes] = {}
        self.ledger_data = bytearray()  # what the ledger's file would hold
        self.result: Result | None = None
        self._figures = ResourceUsage()
        self._checkpoints = Checkpoints()

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of B and the optimizer's state, if the program has a `state`."""
        return self._checkpoints

    def begin_b(self, plan: RunPlan) -> F32:
        """Returns B (D,) before the first step, whatever the plan's start file."""
        return self._start

    def dp_samples(self, plan: RunPlan, examples: int) -> DPSamples:
        """Draws a private run's samples; called once. Raises InvalidDataset, or ValueError for other runs."""
        if plan.privacy is None:
            raise ValueError("a run that is not private draws nothing in secret")
        return draw(plan.privacy, examples, plan.training.steps, plan.manifest.recipe.noised_scalars, self._entropy)

    def open_trajectory(self, plan: RunPlan) -> Ledger:
        """Creates a trajectory."""
        ledger = Ledger(plan.header)
        self.ledger_data = ledger.data
        return ledger

    def limits(self) -> Limits:
        """Returns no limits: a virtual device has no temperature and no owner."""
        return Limits()

    def figures(self) -> ResourceUsage:
        """Returns the recorded resource usage."""
        return self._figures

    def record_usage(self, figures: ResourceUsage) -> None:
        """Records the resource usage so far."""
        self._figures = figures

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Stores B (D,) after `step` steps as the adapter file that a device would upload."""
        self.files[path] = run_adapter(flat, plan, step)

    def finish(self, result: Result) -> None:
        """Stores the result."""
        self.result = result
