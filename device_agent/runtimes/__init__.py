"""The runtime port: a program loaded and ready to train, whatever runs it. Knows no data set and no journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.program import ProgramManifest

F32 = NDArray[np.float32]
Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Secret:
    """What a step of a recipe that clips takes besides: C, and what its sums begin with, whole units (q,)."""

    clip: float
    carried: F32


class Runtime(Protocol):
    """A program's methods (see `shared.program`) over one B. Each raises RuntimeFailed if it cannot run."""

    def step(
        self, batch: Arrays, seeds: NDArray[np.int32], lr: float, eps: float, secret: Secret | None = None
    ) -> tuple[F32, F32]:
        """One MobiZO step on a packed batch; seeds (q, 2). Returns losses (2q,) and coefficients (q,); B has moved.

        secret: of a recipe that clips; totals (q,) then stand in place of the losses.
        """

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """Hidden states (E, S, hidden) of tokens (E, S) before the first adapted layer, if the program has `prefix`."""

    def suffix(
        self,
        hidden: F32,
        batch: Arrays,
        seeds: NDArray[np.int32],
        lr: float,
        eps: float,
        secret: Secret | None = None,
    ) -> tuple[F32, F32]:
        """As `step`, from the prefix's hidden states and a packed batch without its tokens."""

    def replay(self, seeds: NDArray[np.int32], coefficients: F32, eps: float) -> None:
        """The update of one recorded step: seeds (q, 2), coefficients (q,), and its eps, which `stored` depends on."""

    def score(self, batch: Arrays) -> F32:
        """Log-probabilities (R, T, C) under the current B."""

    def adapter(self) -> F32:
        """A copy of B, (D,)."""

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,)."""

    def close(self) -> None:
        """Frees the program's memory."""


def open_runtime(manifest: ProgramManifest, program: Path, weights: Path, *, resident: bool = False) -> Runtime:
    """The program at `program` with the base weights at `weights`, B = 0. Raises RuntimeFailed if it cannot load.

    resident: methods stay loaded, for one process that trains and measures many runs by turns; a device's one run
    spares the memory instead.
    """
    # ExecuTorch and torch weigh hundreds of megabytes: only the process that trains pays for them.
    if manifest.recipe.backend == "torch":
        from device_agent.runtimes.torch_export import TorchRuntime

        return TorchRuntime(manifest, program, weights)
    from device_agent.runtimes.inprocess import InProcessRuntime

    return InProcessRuntime(manifest, program, weights, resident=resident)


def use_threads(count: int) -> None:
    """Has every program of this process, ExecuTorch's or torch's, run on so many threads from now on."""
    from device_agent.runtimes.threads import use_threads as use

    use(count)
