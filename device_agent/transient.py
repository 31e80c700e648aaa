"""A run in memory, for a virtual device of a simulation: what it made is taken from it, and nothing survives a kill.

Its ledger and its adapter files hold what a run directory's would, byte for byte. Knows no disk and no runtime.
"""

from __future__ import annotations

import os
from pathlib import Path

from device_agent.draws import Draws, draw
from device_agent.journal import Figures, RunPlan, run_adapter
from shared.entropy import Entropy
from shared.job import Result
from shared.lora import F32
from shared.trajectory import Ledger, Limits


class TransientRun:
    """One run that is trained in one go; see `device_agent.run.Run`."""

    best = Path("best.safetensors")
    last = Path("last.safetensors")

    def __init__(self, start: F32, entropy: Entropy = os.urandom) -> None:
        """start: B (D,) before the first step. entropy: of a private run, which a simulation may want to repeat."""
        self._start, self._entropy = start, entropy
        self.files: dict[Path, bytes] = {}
        self.ledger_data = bytearray()  # what the ledger's file would hold
        self.result: Result | None = None
        self._figures = Figures()

    def begin_b(self, plan: RunPlan) -> F32:
        """B (D,) before the first step, whatever file the plan names."""
        return self._start

    def draws(self, plan: RunPlan, examples: int) -> Draws:
        """What a private run draws, which is asked for once. Raises InvalidDataset, or ValueError for any other run."""
        if plan.privacy is None:
            raise ValueError("a run that is not private draws nothing in secret")
        return draw(plan.privacy, examples, plan.training.steps, plan.manifest.recipe.queries, self._entropy)

    def open_trajectory(self, plan: RunPlan) -> Ledger:
        """A new ledger."""
        ledger = Ledger(plan.header)
        self.ledger_data = ledger.data
        return ledger

    def limits(self) -> Limits:
        """None: a virtual device has no heat and no owner."""
        return Limits()

    def figures(self) -> Figures:
        """What was noted last."""
        return self._figures

    def note(self, figures: Figures) -> None:
        """Notes time and memory spent so far."""
        self._figures = figures

    def write_adapter(self, path: Path, flat: F32, plan: RunPlan, step: int) -> None:
        """Keeps B (D,) after `step` steps as the adapter file that a device would upload."""
        self.files[path] = run_adapter(flat, plan, step)

    def finish(self, result: Result) -> None:
        """Keeps the result."""
        self.result = result
