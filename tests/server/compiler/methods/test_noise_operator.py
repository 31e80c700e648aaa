"""The paper's noise operator: what the exporter is told of it, and the programs that call it.

What such a program computes is tested where the kernel is: tests/device_agent/runtimes/test_noise_operator.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from executorch.exir._serialize import _deserialize_pte_binary
from executorch.exir.schema import KernelCall

from server.compiler.methods.noise_operator import OUT, noise_call
from shared.zo.noise import gaussian
from tests.programs import shared_store
from tests.server.compiler.conftest import TinyBase

SEEDS = np.array([[1, -2], [2**31 - 1, -(2**31)], [0, 0]], np.int32)


@pytest.mark.parametrize("size", [1, 2, 771])
def test_it_draws_the_reference_directions(size: int) -> None:
    expected = [gaussian((int(first), int(second)), size) for first, second in SEEDS]
    np.testing.assert_allclose(noise_call(torch.from_numpy(SEEDS), size).numpy(), expected, rtol=0, atol=2e-6)


def test_the_exporter_is_told_its_true_shape_and_type() -> None:
    torch.library.opcheck(
        torch.ops.mobizo.noise.default,
        (torch.from_numpy(SEEDS), 7),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.fixture(scope="module")
def methods(tiny: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The kernels that each method of a program calls. Its lower layer is frozen, so that it has `suffix`."""
    recipe = tiny.recipe(queries=2, layers="last:1", estimator="stored", noise="operator")
    directory = tmp_path_factory.mktemp("operator")
    manifest = shared_store().put(recipe, tiny.directory, directory)
    data = (directory / manifest.file("program").name).read_bytes()
    called = {}
    for plan in _deserialize_pte_binary(data).program.execution_plan:
        calls = [each.instr_args for chain in plan.chains for each in chain.instructions]
        operators = [plan.operators[call.op_index] for call in calls if isinstance(call, KernelCall)]
        called[plan.name] = [f"{each.name}.{each.overload}".rstrip(".") for each in operators]
    return called


@pytest.mark.slow
def test_methods_that_perturb_call_it_once(methods: dict[str, list[str]]) -> None:
    assert {name: calls.count(OUT) for name, calls in methods.items() if OUT in calls} == {
        "step": 1,
        "suffix": 1,
        "replay": 1,
    }
    assert {"prefix", "score", "adapter", "load", "flush"} <= set(methods)


@pytest.mark.slow
def test_nothing_of_the_arithmetic_is_left_in_the_graph(methods: dict[str, list[str]]) -> None:
    drawing = ("aten::bitwise", "aten::sqrt.out", "aten::randn")
    of_a_model = ("aten::log.out", "aten::sin", "aten::cos")  # its loss, and RoPE's tables
    assert not [name for name in methods["step"] if name.startswith(drawing)]
    assert not [name for name in methods["replay"] if name.startswith((*drawing, *of_a_model))]
