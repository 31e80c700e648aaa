"""Portable programs take every length, as XNNPACK's do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from server.compiler.export.emission import Signature
from shared.errors import CompileFailed
from shared.recipe import TARGETS
from shared.zo.noise import query_seeds
from tests.server.compiler.conftest import Programs, TinyBase, token_batch


@pytest.mark.slow
def test_a_shorter_batch_gives_what_xnnpack_gives(programs: Programs, tiny: TinyBase) -> None:
    rng = np.random.default_rng(0)
    for length in (12, 7, 2):
        tokens, answers = token_batch(rng, 2, length), token_batch(rng, 2, 2)
        positions = rng.integers(0, length, (2, 2))
        scalars = np.array([0.1], np.float32), np.array([0.01], np.float32)
        found = []
        for name in ("portable", "xnnpack"):
            program = programs(tiny, queries=1, backend=name, targets=TARGETS)
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
