"""Several graphs are lowered at a time, in processes of their own, to the same delegates."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.export import lowering
from server.compiler.export.backends.xnnpack import lower_layers
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import LayerGroup, at_once
from server.compiler.export.weights import StoredKeys
from shared.errors import CompileFailed, UnsupportedModel

CORES = {"one core": 1, "two cores": 2}


@pytest.fixture(params=CORES)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count = CORES[request.param]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(count)))
    return count


def test_results_are_in_order_and_the_last_function_runs_here(cores: int) -> None:
    results = at_once([partial(lambda number: (number, os.getpid()), number) for number in range(3)])
    assert [number for number, _ in results] == [0, 1, 2]
    assert [process == os.getpid() for _, process in results] == [cores == 1, cores == 1, True]
    assert at_once([]) == []


def test_what_a_function_raises_is_raised(cores: int) -> None:
    def refuse() -> int:
        raise UnsupportedModel("no such layer")

    for functions in ([refuse, int], [int, refuse]):
        with pytest.raises(UnsupportedModel, match="no such layer"):
            at_once(functions)


def test_a_killed_child_is_a_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "cores", lambda: 2)
    with pytest.raises(CompileFailed, match="exit code -9"):
        at_once([lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None])


class Linear(nn.Module):
    """A linear layer in small."""

    weight: Tensor

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(outputs, 8, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def test_delegates_do_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (torch.zeros(2, 8),)
    groups = [LayerGroup([Linear(outputs, seed) for seed in range(2)], example, None) for outputs in (4, 6, 8)]
    payloads = []
    for count in CORES.values():
        monkeypatch.setattr(lowering, "cores", lambda count=count: count)
        delegates = lower_layers(groups, StoredKeys(), LoweredFiles())
        payloads.append([[delegate.processed_bytes for delegate in group] for group in delegates])
    assert payloads[0] == payloads[1]
    assert len({payload for group in payloads[0] for payload in group}) == 6
