"""What runs measure without having trained, kept for later runs of the device: the metrics of a split at the initial B,
the baseline, and the frozen layers' output for reference texts, which are public.

They depend only on the program, the initial B and the examples. A file is named by the sha256 of these and has no text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from device_agent.executors import F32
from device_agent.training.baseline import Baseline, measure_baseline
from device_agent.training.evaluation import SplitMetrics
from device_agent.training.run_plan import RunPlan
from shared.canonical import sha256_hex
from shared.durable import write_durably
from shared.zo.encoding import Example

MAX_FILES, MAX_BYTES = 200, 64 << 20  # the oldest files are removed


class StartMeasurements:
    """The files of one directory, for the program and the initial B of a run."""

    def __init__(self, directory: Path, plan: RunPlan) -> None:
        """directory: of one executor, because others may round differently."""
        self._directory, self._start = directory, plan.start_sha256
        files = [plan.manifest.file("program").sha256, plan.manifest.file("weights").sha256]
        self._program = [*files, plan.dynamic_length]

    def metrics(self, examples: Sequence[Example], loss: str, measure: Callable[[], SplitMetrics]) -> SplitMetrics:
        """Returns the metrics of examples at the initial B, by `measure` if no earlier run has kept them.

        loss: of the recipe by which they are scored.
        """
        path = self._path("metrics", loss, self._start, examples)
        return SplitMetrics(**self._recall(path, lambda: asdict(measure())))

    def baseline(self, train: Sequence[Example], measured: Sequence[Example]) -> Baseline:
        """Returns what `measure_baseline` does."""
        path = self._path("baseline", train, measured)
        return Baseline(**self._recall(path, lambda: asdict(measure_baseline(train, measured))))

    def states(self, examples: Sequence[Example]) -> F32 | None:
        """Returns the kept hidden states of examples' texts, float32 (N * hidden,); None if there are none."""
        with suppress(OSError, ValueError):
            return np.frombuffer(self._path("states", examples).read_bytes(), "<f4")
        return None

    def keep_states(self, examples: Sequence[Example], states: F32) -> None:
        """Keeps hidden states, which `states` then returns for the same examples."""
        path = self._path("states", examples)
        if not path.exists():
            self._write(path, states.astype("<f4").tobytes())

    def _path(self, *facts: Any) -> Path:
        return self._directory / sha256_hex(repr((self._program, facts)).encode())

    def _recall(self, path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            values: dict[str, Any] = json.loads(path.read_bytes())
            return values
        values = measure()
        self._write(path, json.dumps(values).encode())
        return values

    def _write(self, path: Path, content: bytes) -> None:
        """Writes a file, and removes the oldest beyond MAX_FILES or MAX_BYTES. A full disk only loses the file."""
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(path, content)
            total = 0
            newest_first = sorted(self._directory.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for number, file in enumerate(newest_first, 1):
                total += file.stat().st_size
                if number > MAX_FILES or total > MAX_BYTES:
                    file.unlink()
