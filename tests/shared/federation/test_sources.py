"""Update sources, and the validation of updates."""

import numpy as np
import pytest

from shared.federation.sources import MemorySource
from shared.federation.update import Update, euclidean_norm


def update(member, values, **claims):
    return Update(member, np.array(values, np.float32), **claims)


def test_updates_are_ordered_by_member():
    updates = [update("b", [2, 2]), update("a", [1, 1]), update("c", [3, 3])]
    forward, backward = MemorySource(updates), MemorySource(updates[::-1])
    assert [each.member for each in forward.updates()] == ["a", "b", "c"]
    assert [each.member for each in backward.updates()] == ["a", "b", "c"]


def test_blocks_are_columns_of_all_updates():
    source = MemorySource([update("a", [1, 2, 3]), update("b", [4, 5, 6])])
    blocks = [(offset, block.tolist()) for offset, block in source.blocks(2)]
    assert blocks == [(0, [[1, 2], [4, 5]]), (2, [[3], [6]])]


def test_invalid_sources_are_rejected():
    with pytest.raises(ValueError, match="no updates"):
        MemorySource([])
    with pytest.raises(ValueError, match="a has more than one"):
        MemorySource([update("a", [1]), update("b", [1]), update("a", [2])])
    with pytest.raises(ValueError, match=r"\[1, 2\] elements"):
        MemorySource([update("a", [1]), update("b", [1, 2])])


def test_invalid_updates_are_rejected():
    with pytest.raises(ValueError, match="float64"):
        Update("a", np.zeros(3))
    with pytest.raises(ValueError, match=r"\(1, 3\)"):
        Update("a", np.zeros((1, 3), np.float32))
    with pytest.raises(ValueError, match="-1 examples"):
        Update("a", np.zeros(3, np.float32), examples=-1)


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1.0, 1e20, 1e37])
def test_norms_of_any_scale(scale):
    flat = (scale * np.random.default_rng(0).uniform(-1, 1, 20_000)).astype(np.float32)
    expected = float(np.sqrt((flat.astype(np.longdouble) ** 2).sum()))
    assert euclidean_norm(flat) == pytest.approx(expected, rel=1e-12)
    assert update("a", flat).norm == euclidean_norm(flat)
