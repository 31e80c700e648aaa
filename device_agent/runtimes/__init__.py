"""The interface of a loaded program that is ready to train, and the part that all in-process runtimes share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.program import ProgramManifest

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class PrivateStepInput:
    """Additional inputs of a private step: the clipping bound C, and the sums carried from earlier calls (q,)."""

    clip: float
    carried: F32


@dataclass(frozen=True)
class PrivateGradientInput:
    """Additional inputs of a private step with the exact gradient.

    clip: C. sigma: the noise multiplier. last: whether this call adds the noise and moves B. keys: secret, int32
    (NOISE_KEYS, 2). carried: the sums of earlier calls, int32 (D,).
    """

    clip: float
    sigma: float
    last: bool
    keys: I32
    carried: I32


@dataclass(frozen=True)
class Rates:
    """The hyperparameters of one step with the exact gradient."""

    lr: float
    max_norm: float | None = None  # upper bound of the mean gradient's L2 norm; None: no clipping
    weight_decay: float = 0.0


class Runtime(Protocol):
    """A program's methods (see `shared.program`) over one B. Each raises RuntimeFailed if it cannot run."""

    def step(
        self, batch: Arrays, seeds: NDArray[np.int32], lr: float, eps: float, secret: PrivateStepInput | None = None
    ) -> tuple[F32, F32]:
        """Runs one MobiZO step on a packed batch; seeds (q, 2). Updates B; returns losses (2q,), coefficients (q,).

        secret: for a recipe with clipping, which returns totals (q,) instead of losses.
        """

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """Returns hidden states (E, S, hidden) of tokens (E, S) before the first adapted layer."""

    def suffix(
        self,
        hidden: F32,
        batch: Arrays,
        seeds: NDArray[np.int32],
        lr: float,
        eps: float,
        secret: PrivateStepInput | None = None,
    ) -> tuple[F32, F32]:
        """Like `step`, from the prefix's hidden states and a packed batch without its tokens."""

    def replay(self, seeds: NDArray[np.int32], coefficients: F32, eps: float) -> None:
        """Applies a recorded step's update: seeds (q, 2), coefficients (q,), and eps, which `stored` needs."""

    def gradient_step(
        self, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Runs one step with the exact gradient on a batch. Returns its loss (1,) and the gradient's norm (1,).

        secret: for a recipe with clipping, which returns totals, int32 (D,), instead of the loss.
        """

    def gradient_suffix(
        self, hidden: F32, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Like `gradient_step`, from the prefix's hidden states and a packed batch without its tokens."""

    def state(self) -> F32:
        """Returns a copy of B (D,) and the optimizer's state in one vector (M,), from programs with `state`."""

    def restore(self, state: F32) -> None:
        """Sets B and the optimizer's state to a vector that `state` returned."""

    def score(self, batch: Arrays) -> F32:
        """Returns log-probabilities (R, T, C) under the current B."""

    def score_suffix(self, hidden: F32, batch: Arrays) -> F32:
        """Like `score`, from the prefix's hidden states (R, S, hidden) and a packed batch without its tokens."""

    def adapter(self) -> F32:
        """Returns a copy of B (D,)."""

    def load(self, flat: F32) -> None:
        """Sets B to a copy of `flat` (D,)."""

    def close(self) -> None:
        """Frees the program's memory."""


def open_runtime(manifest: ProgramManifest, program: Path, weights: Path, *, resident: bool = False) -> Runtime:
    """Opens the program at `program` with the base weights at `weights` and B = 0. Raises RuntimeFailed.

    resident: keeps all methods loaded, for a process that alternates between many runs; a device saves the memory.
    """
    # Imported here because ExecuTorch and torch use hundreds of megabytes.
    if manifest.recipe.backend == "torch":
        from device_agent.runtimes.torch_export import TorchRuntime

        return TorchRuntime(manifest, program, weights)
    from device_agent.runtimes.inprocess import InProcessRuntime

    return InProcessRuntime(manifest, program, weights, resident=resident)


def use_threads(count: int) -> None:
    """Sets the number of threads of every program of this process, for ExecuTorch and torch."""
    from device_agent.runtimes.threads import use_threads as use

    use(count)


class CallingRuntime(ABC):
    """A runtime that maps each method of `Runtime` to one call of the program."""

    def __init__(self, manifest: ProgramManifest) -> None:
        self._manifest = manifest

    @abstractmethod
    def _call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a method. Raises RuntimeFailed."""

    def step(
        self, batch: Arrays, seeds: NDArray[np.int32], lr: float, eps: float, secret: PrivateStepInput | None = None
    ) -> tuple[F32, F32]:
        """Runs one MobiZO step; see `Runtime.step`."""
        losses, coefficients = self._call("step", (*batch, seeds, _scalar(lr), _scalar(eps), *_inputs(secret)))
        return losses, coefficients

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """Runs the frozen lower layers; see `Runtime.prefix`."""
        return self._call("prefix", (tokens,))[0]

    def suffix(
        self,
        hidden: F32,
        batch: Arrays,
        seeds: NDArray[np.int32],
        lr: float,
        eps: float,
        secret: PrivateStepInput | None = None,
    ) -> tuple[F32, F32]:
        """Runs one MobiZO step from the prefix's hidden states; see `Runtime.suffix`."""
        inputs = (hidden, *batch, seeds, _scalar(lr), _scalar(eps), *_inputs(secret))
        losses, coefficients = self._call("suffix", inputs)
        return losses, coefficients

    def replay(self, seeds: NDArray[np.int32], coefficients: F32, eps: float) -> None:
        """Applies the update of one recorded step; see `Runtime.replay`."""
        scale = (_scalar(eps),) if self._manifest.recipe.estimator == "stored" else ()
        self._call("replay", (seeds, coefficients, *scale))

    def gradient_step(
        self, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Runs one step with the exact gradient; see `Runtime.gradient_step`."""
        loss, norm = self._call("step", (*batch, *_rates(rates), *_gradient_inputs(secret)))
        return loss, norm

    def gradient_suffix(
        self, hidden: F32, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Runs one step with the exact gradient from hidden states; see `Runtime.gradient_suffix`."""
        loss, norm = self._call("suffix", (hidden, *batch, *_rates(rates), *_gradient_inputs(secret)))
        return loss, norm

    def state(self) -> F32:
        """Returns a copy of B and the optimizer's state."""
        return self._call("state", ())[0]

    def restore(self, state: F32) -> None:
        """Sets B and the optimizer's state to `state`."""
        self._call("restore", (state,))

    def score(self, batch: Arrays) -> F32:
        """Returns log-probabilities (R, T, C)."""
        return self._call("score", batch)[0]

    def score_suffix(self, hidden: F32, batch: Arrays) -> F32:
        """Returns log-probabilities (R, T, C) from hidden states; see `Runtime.score_suffix`."""
        return self._call("score_suffix", (hidden, *batch))[0]

    def adapter(self) -> F32:
        """Returns a copy of B (D,)."""
        return self._call("adapter", ())[0]

    def load(self, flat: F32) -> None:
        """Sets B to a copy of `flat` (D,). Raises ValueError for another shape."""
        if flat.shape != (self._manifest.size,):
            raise ValueError(f"B of shape {flat.shape} for a program of size {self._manifest.size}")
        self._call("load", (flat.astype(np.float32, copy=False),))


def _scalar(value: float) -> F32:
    return np.array([value], np.float32)


def _rates(rates: Rates) -> Arrays:
    max_norm = np.inf if rates.max_norm is None else rates.max_norm
    return _scalar(rates.lr), _scalar(max_norm), _scalar(rates.weight_decay)


def _gradient_inputs(secret: PrivateGradientInput | None) -> Arrays:
    if secret is None:
        return ()
    return _scalar(secret.clip), _scalar(secret.sigma), _scalar(float(secret.last)), secret.keys, secret.carried


def _inputs(secret: PrivateStepInput | None) -> Arrays:
    return () if secret is None else (_scalar(secret.clip), secret.carried)
