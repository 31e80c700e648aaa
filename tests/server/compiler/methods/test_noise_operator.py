"""The paper's noise operator: what the exporter is told of it, and the programs that call it.

What such a program computes is tested where the kernel is: tests/device_agent/runtimes/test_noise_operator.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.compiler.export.inspection import Method, inspect_program
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
def methods(tiny: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Method]:
    """Methods by name of a program whose lower layer is frozen, so that it has `suffix`."""
    recipe = tiny.recipe(queries=2, layers="last:1", estimator="stored", noise="operator")
    directory = tmp_path_factory.mktemp("operator")
    manifest = shared_store().put(recipe, tiny.directory, directory)
    return {method.name: method for method in inspect_program(directory / manifest.file("program").name).methods}


@pytest.mark.slow
def test_methods_that_perturb_call_it_once(methods: dict[str, Method]) -> None:
    assert {name: method.operators[OUT] for name, method in methods.items() if OUT in method.operators} == {
        "step": 1,
        "suffix": 1,
        "replay": 1,
    }
    assert {"prefix", "score", "adapter", "load", "flush"} <= set(methods)


@pytest.mark.slow
def test_nothing_of_the_arithmetic_is_left_in_the_graph(methods: dict[str, Method]) -> None:
    drawing = ("aten::bitwise", "aten::log.out", "aten::sqrt.out", "aten::randn")
    assert not [name for name in methods["step"].operators if name.startswith(drawing)]
    assert not [name for name in methods["replay"].operators if name.startswith((*drawing, "aten::sin", "aten::cos"))]
