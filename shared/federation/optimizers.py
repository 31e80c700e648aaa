"""Server optimizers: they apply the round's aggregated update, taken as a gradient, to the shared adapter.

The functions are pure; the state is stored as a safetensors file between rounds. Arithmetic is float64, stored values
are float32.

source: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (sgd and adam: algorithms 1 and 2, with v_0 = tau^2 and
without bias correction); Hsu et al., 2019 (momentum: FedAvgM). Delta is the update, x the adapter, eps is tau:

    sgd        x + lr Delta
    momentum   m = beta1 m + Delta;  x + lr m
    adam       m = beta1 m + (1 - beta1) Delta;  v = beta2 v + (1 - beta2) Delta^2;  x + lr m / (sqrt(v) + eps)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import safetensors
import safetensors.numpy

from shared.canonical import canonical_json
from shared.federation.cohort import OptimizerName, OptimizerSettings
from shared.federation.update import BLOCK, F32, F64

StateBlock = dict[str, F64]  # a block of each state vector
Rule = Callable[[OptimizerSettings, F64, StateBlock], F64]


def _sgd(settings: OptimizerSettings, delta: F64, state: StateBlock) -> F64:
    return settings.lr * delta


def _momentum(settings: OptimizerSettings, delta: F64, state: StateBlock) -> F64:
    state["m"] = settings.beta1 * state["m"] + delta
    return settings.lr * state["m"]


def _adam(settings: OptimizerSettings, delta: F64, state: StateBlock) -> F64:
    state["m"] = settings.beta1 * state["m"] + (1 - settings.beta1) * delta
    state["v"] = settings.beta2 * state["v"] + (1 - settings.beta2) * delta**2
    return settings.lr * state["m"] / (np.sqrt(state["v"]) + settings.eps)


_RULES: dict[OptimizerName, tuple[Rule, tuple[str, ...]]] = {
    "sgd": (_sgd, ()),
    "momentum": (_momentum, ("m",)),
    "adam": (_adam, ("m", "v")),
}


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer between rounds: float32 (D,) vectors by name."""

    name: OptimizerName
    size: int  # D
    rounds: int = 0
    vectors: Mapping[str, F32] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Returns a safetensors file of about 4 D bytes per vector."""
        metadata = {"format": 1, "optimizer": self.name, "rounds": self.rounds, "size": self.size}
        tensors = {name: np.ascontiguousarray(vector, "<f4") for name, vector in self.vectors.items()}
        return safetensors.numpy.save(tensors, {"mobizo": canonical_json(metadata).decode()})


def initial_state(settings: OptimizerSettings, size: int) -> OptimizerState:
    """Returns the state before the first round of an adapter with D = `size`."""
    initial_values = {"m": 0.0, "v": settings.eps**2}
    names = _RULES[settings.name][1]
    return OptimizerState(
        settings.name, size, 0, {name: np.full(size, initial_values[name], np.float32) for name in names}
    )


def load_state(data: bytes, settings: OptimizerSettings, size: int) -> OptimizerState:
    """Loads a state that `dump` wrote. Raises ValueError if it is damaged or has another optimizer or D."""
    try:
        tensors = safetensors.numpy.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header["__metadata__"]["mobizo"])
        state = OptimizerState(metadata["optimizer"], metadata["size"], metadata["rounds"], tensors)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is not the state of a server optimizer ({error})") from error
    if (state.name, state.size) != (settings.name, size):
        raise ValueError(
            f"the state belongs to {state.name} with D = {state.size}, not to {settings.name} with D = {size}"
        )
    expected = {name: ((size,), np.dtype(np.float32)) for name in _RULES[settings.name][1]}
    if {name: (vector.shape, vector.dtype) for name, vector in tensors.items()} != expected:
        raise ValueError(f"the state of {state.name} does not contain the vectors of {state.name}")
    return state


def advance(
    settings: OptimizerSettings, state: OptimizerState, adapter: F32, update: F32
) -> tuple[F32, OptimizerState]:
    """Returns the next adapter, float32 (D,), and the next state, from the adapter (D,) and the round's update (D,).

    With sgd, lr 1 and equal weights the next adapter is the mean of the devices' B. Raises ValueError if sizes or the
    optimizer differ.
    """
    if {adapter.shape, update.shape} != {(state.size,)} or state.name != settings.name:
        raise ValueError(f"{settings.name} on {adapter.size} and {update.size} elements with a state of {state}")
    rule, names = _RULES[settings.name]
    next_adapter = np.empty(state.size, np.float32)
    vectors = {name: np.empty(state.size, np.float32) for name in names}
    for start in range(0, state.size, BLOCK):
        block = slice(start, start + BLOCK)
        state_block = {name: state.vectors[name][block].astype(np.float64) for name in names}
        next_adapter[block] = adapter[block] + rule(settings, update[block].astype(np.float64), state_block)
        for name in names:
            vectors[name][block] = state_block[name]
    return next_adapter, OptimizerState(state.name, state.size, state.rounds + 1, vectors)
