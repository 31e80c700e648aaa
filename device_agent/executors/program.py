"""The typed methods of a loaded program (see `shared.program`): one for training, and one for inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_agent.executors import F32, I32, Arrays, Executor, ExecutorUsage
from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE


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
        self, batch: Arrays, seeds: I32, lr: float, eps: float, secret: PrivateStepInput | None = None
    ) -> tuple[F32, F32]:
        """Runs one MobiZO step on a packed batch; seeds (q, 2). Updates B; returns losses (2q,), coefficients (q,).

        secret: for a recipe with clipping, which returns totals (q,) instead of losses.
        """
        losses, coefficients = self._call("step", *batch, seeds, _scalar(lr), _scalar(eps), *_step_inputs(secret))
        return losses, coefficients

    def prefix(self, tokens: NDArray[np.int64]) -> F32:
        """Returns hidden states (E, S, hidden) of tokens (E, S) before the first adapted layer."""
        return self._call("prefix", tokens)[0]

    def suffix(
        self, hidden: F32, batch: Arrays, seeds: I32, lr: float, eps: float, secret: PrivateStepInput | None = None
    ) -> tuple[F32, F32]:
        """Like `step`, from the prefix's hidden states and a packed batch without its tokens."""
        inputs = (hidden, *batch, seeds, _scalar(lr), _scalar(eps), *_step_inputs(secret))
        losses, coefficients = self._call("suffix", *inputs)
        return losses, coefficients

    def replay(self, seeds: I32, coefficients: F32, eps: float) -> None:
        """Applies a recorded step's update: seeds (q, 2), coefficients (q,), and eps, which `stored` needs."""
        scale = (_scalar(eps),) if self._manifest.recipe.estimator == "stored" else ()
        self._call("replay", seeds, coefficients, *scale)

    def gradient_step(
        self, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Runs one step with the exact gradient on a batch. Returns its loss (1,) and the gradient's norm (1,).

        secret: for a recipe with clipping, which returns totals, int32 (D,), instead of the loss.
        """
        loss, norm = self._call("step", *batch, *_rates(rates), *_gradient_inputs(secret))
        return loss, norm

    def gradient_suffix(
        self, hidden: F32, batch: Arrays, rates: Rates, secret: PrivateGradientInput | None = None
    ) -> tuple[NDArray[Any], F32]:
        """Like `gradient_step`, from the prefix's hidden states and a packed batch without its tokens."""
        loss, norm = self._call("suffix", hidden, *batch, *_rates(rates), *_gradient_inputs(secret))
        return loss, norm

    def state(self) -> F32:
        """Returns a copy of B (D,) and the optimizer's state in one vector (M,), from programs with `state`."""
        return self._call("state")[0]

    def restore(self, state: F32) -> None:
        """Sets B and the optimizer's state to a vector that `state` returned."""
        self._call("restore", state)

    def score(self, batch: Arrays) -> F32:
        """Returns log-probabilities (R, T, C) under the current B."""
        return self._call("score", *batch)[0]

    def score_suffix(self, hidden: F32, batch: Arrays) -> F32:
        """Like `score`, from the prefix's hidden states (R, S, hidden) and a packed batch without its tokens."""
        return self._call("score_suffix", hidden, *batch)[0]


class InferenceProgram(LoadedProgram):
    """The methods of an inference file, over one B and one text's cache."""

    def __init__(self, manifest: ProgramManifest, executor: Executor) -> None:
        """Starts with B = 0 and an empty cache."""
        super().__init__(manifest, executor)
        self.load(np.zeros(manifest.size, np.float32))
        self.extend([0], 0, [0])  # the first call packs the weights

    def extend(self, tokens: Sequence[int], start: int, picks: Sequence[int]) -> F32:
        """Appends `tokens` at position `start`. Returns the logits (P, V) after the tokens at indices `picks`."""
        inputs = ([tokens], [start], picks)
        return self._call("extend", *(np.array(values, TOKEN_DTYPE) for values in inputs))[0]


def _scalar(value: float) -> F32:
    return np.array([value], np.float32)


def _rates(rates: Rates) -> Arrays:
    max_norm = np.inf if rates.max_norm is None else rates.max_norm
    return _scalar(rates.lr), _scalar(max_norm), _scalar(rates.weight_decay)


def _step_inputs(secret: PrivateStepInput | None) -> Arrays:
    return () if secret is None else (_scalar(secret.clip), secret.carried)


def _gradient_inputs(secret: PrivateGradientInput | None) -> Arrays:
    if secret is None:
        return ()
    return _scalar(secret.clip), _scalar(secret.sigma), _scalar(float(secret.last)), secret.keys, secret.carried
