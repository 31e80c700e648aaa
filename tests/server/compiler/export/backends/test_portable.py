"""Portable programs take every length, as XNNPACK's do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from server.compiler import compile_program
from server.compiler.export.backends import HOMES, backend
from server.compiler.export.emission import Signature
from shared.errors import CompileFailed, InvalidRecipe
from shared.recipe import Backend, Precision
from shared.zo.noise import query_seeds
from tests.server.compiler.conftest import Programs, TinyBase, token_batch


@pytest.mark.slow
def test_a_shorter_batch_gives_what_xnnpack_gives(programs: Programs) -> None:
    rng = np.random.default_rng(0)
    for length in (12, 7, 2):
        tokens, answers = token_batch(rng, 2, length), token_batch(rng, 2, 2)
        positions = rng.integers(0, length, (2, 2))
        scalars = np.array([0.1], np.float32), np.array([0.01], np.float32)
        found = []
        for name in ("portable", "xnnpack"):
            program, _ = programs(1, "rademacher", "full", name)
            assert program.manifest.dynamic_length
            mask = np.ones((2, 2), np.float32)
            losses, _ = program("step", tokens, positions, answers, mask, query_seeds(0, 1, 1), *scalars)
            found.append(losses)
        np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


class Fixed(nn.Module):
    """Writes its length down."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 12) + 1.0


def test_a_graph_that_holds_for_one_length_is_refused() -> None:
    signature = Signature(Fixed(), (torch.zeros(2, 12),), {0: {1: Dim("S", min=2, max=12)}})
    with pytest.raises(CompileFailed, match="the graph of Fixed is specialized to one value of S"):
        signature.export()


@pytest.mark.parametrize("name", HOMES)
def test_every_backend_has_full_precision_and_a_file_of_each_role(name: Backend) -> None:
    found = backend(name)
    assert "fp32" in found.precisions
    assert {"program", "weights", "tokenizer"} <= set(found.files)


@pytest.mark.parametrize("precision", ["int8", "int4", "int8-weight", "int4-weight"])
def test_portable_operators_have_full_precision_alone(tiny: TinyBase, tmp_path: Path, precision: Precision) -> None:
    with pytest.raises(InvalidRecipe, match=f"{precision} is not one that backend portable has"):
        compile_program(tiny.recipe(backend="portable", precision=precision), str(tiny.directory), tmp_path)
