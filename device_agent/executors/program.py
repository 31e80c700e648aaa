"""The typed methods of a loaded program (see `shared.program`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.executors import F32, I32, Arrays, Executor, ExecutorUsage
from shared.program import ProgramManifest


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of one step with the exact gradient."""

    lr: float
    max_norm: float | None = None  # upper bound of the mean gradient's L2 norm; None: no clipping
    weight_decay: float = 0.0


class LoadedProgram:
    """What training and inference have in common. Every method raises what `Executor.call` raises."""

    def __init__(self, manifest: ProgramManifest, executor: Executor) -> None:
        """executor: has loaded a program of the manifest."""
        self._manifest, self._executor = manifest, executor

    def _call(self, method: str, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        return self._executor.call(method, inputs)

    def adapter(self) -> F32:
        """Returns a copy of B (D,)."""
        return self._call("adapter")[0]

    def load(self, flat: F32) -> None:
        """Sets B to a copy of `flat` (D,). Raises ValueError for another shape."""
        if flat.shape != (self._manifest.size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._manifest.size}")
        self._call("load", flat.astype(np.float32, copy=False))

    def usage(self) -> ExecutorUsage:
        """Returns the executor's memory and load time."""
        return self._executor.usage()

    def close(self) -> None:
        """Ends the executor."""
        self._executor.close()


class TrainingProgram(LoadedProgram):
    """The methods of a training program, over one B and the optimizer's state."""

    def step(
        self,
        batch: Arrays,
        seeds: I32,
        lr: float,
        eps: float,
        secret: Arrays = (),
        hidden: F32 | None = None,
    ) -> tuple[F32, F32]:
        """Runs one MobiZO step on a packed batch; seeds (q, 2). Updates B; returns losses (2q,), coefficients (q,).

        secret: for a recipe with clipping, which returns totals (q,) instead of losses: the bound C (1,), and the sums
        of earlier calls (q,). hidden: the output of `prefix` (E, S, hidden); the batch is then without its tokens.
        """
        inputs = (*batch, seeds, scalar(lr), scalar(eps), *secret)
        losses, coefficients = self._call_from(hidden, "step", "suffix", inputs)
        return losses, coefficients

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """Returns hidden states (E, S, hidden) of tokens (E, S) before the first adapted layer."""
        return self._call("prefix", tokens)[0]

    def replay(self, seeds: I32, coefficients: F32, eps: float) -> None:
        """Applies a recorded step's update: seeds (q, 2), coefficients (q,), and eps, which `stored` needs."""
        scale = (scalar(eps),) if self._manifest.recipe.estimator == "stored" else ()
        self._call("replay", seeds, coefficients, *scale)

    def gradient_step(
        self, batch: Arrays, rates: Rates, secret: Arrays = (), hidden: F32 | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Runs one step with the exact gradient on a batch. Returns its loss (1,) and the gradient's norm (1,).

        secret: for a recipe with clipping, which returns totals, int32 (D,), instead of the loss: the bound C (1,), the
        noise multiplier (1,), 1 if this call adds the noise and moves B, else 0 (1,), the noise's keys, int32
        (NOISE_KEYS, 2), and the sums of earlier calls, int32 (D,). hidden: as of `step`.
        """
        max_norm = np.inf if rates.max_norm is None else rates.max_norm
        inputs = (*batch, scalar(rates.lr), scalar(max_norm), scalar(rates.weight_decay), *secret)
        loss, norm = self._call_from(hidden, "step", "suffix", inputs)
        return loss, norm

    def state(self) -> F32:
        """Returns a copy of B (D,) and the optimizer's state in one vector (M,), from programs with `state`."""
        return self._call("state")[0]

    def restore(self, state: F32) -> None:
        """Sets B and the optimizer's state to a vector that `state` returned."""
        self._call("restore", state)

    def score(self, batch: Arrays, hidden: F32 | None = None) -> F32:
        """Returns log-probabilities (R, T, C) under the current B. hidden: as of `step`, of R rows."""
        return self._call_from(hidden, "score", "score_suffix", batch)[0]

    def _call_from(self, hidden: F32 | None, whole: str, suffix: str, inputs: Arrays) -> list[NDArray[Any]]:
        """Calls the method that runs all layers, or the one that continues from the frozen layers' output."""
        return self._call(whole, *inputs) if hidden is None else self._call(suffix, hidden, *inputs)


def scalar(value: float) -> F32:
    """Returns a number as an input of a method, float32 (1,)."""
    return np.array([value], np.float32)
