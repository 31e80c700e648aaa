"""The runtime contract's methods over one way to call a program's by name. Knows no file and no library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.runtimes import F32, Arrays, Secret
from shared.program import ProgramManifest


class CallingRuntime(ABC):
    """A runtime whose methods take and give what the program's do; see `Runtime`."""

    def __init__(self, manifest: ProgramManifest) -> None:
        self._manifest = manifest

    @abstractmethod
    def _call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs of a method. Raises RuntimeFailed."""

    def step(
        self, batch: Arrays, seeds: NDArray[np.int32], lr: float, eps: float, secret: Secret | None = None
    ) -> tuple[F32, F32]:
        """One MobiZO step; see `Runtime.step`."""
        losses, coefficients = self._call("step", (*batch, seeds, _scalar(lr), _scalar(eps), *_inputs(secret)))
        return losses, coefficients

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """The frozen lower layers; see `Runtime.prefix`."""
        return self._call("prefix", (tokens,))[0]

    def suffix(
        self,
        hidden: F32,
        batch: Arrays,
        seeds: NDArray[np.int32],
        lr: float,
        eps: float,
        secret: Secret | None = None,
    ) -> tuple[F32, F32]:
        """One MobiZO step from the prefix's hidden states; see `Runtime.suffix`."""
        inputs = (hidden, *batch, seeds, _scalar(lr), _scalar(eps), *_inputs(secret))
        losses, coefficients = self._call("suffix", inputs)
        return losses, coefficients

    def replay(self, seeds: NDArray[np.int32], coefficients: F32, eps: float) -> None:
        """The update of one recorded step; see `Runtime.replay`."""
        scale = (_scalar(eps),) if self._manifest.recipe.estimator == "stored" else ()
        self._call("replay", (seeds, coefficients, *scale))

    def score(self, batch: Arrays) -> F32:
        """Log-probabilities (R, T, C)."""
        return self._call("score", batch)[0]

    def adapter(self) -> F32:
        """A copy of B, (D,)."""
        return self._call("adapter", ())[0]

    def load(self, flat: F32) -> None:
        """Makes B a copy of `flat` (D,). Raises ValueError for another shape."""
        if flat.shape != (self._manifest.size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._manifest.size}")
        self._call("load", (flat.astype(np.float32, copy=False),))


def _scalar(value: float) -> F32:
    return np.array([value], np.float32)


def _inputs(secret: Secret | None) -> Arrays:
    return () if secret is None else (_scalar(secret.clip), secret.carried)
