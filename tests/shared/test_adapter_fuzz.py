"""Thousands of adapter files that are almost right: each refused, none at any price in memory."""

import tracemalloc
from collections import Counter

import pytest

from shared.errors import InvalidUpload
from shared.zo.lora import HEADER_BYTES, load_adapter
from tests.shared.adapter_fuzz import KINDS, good, malformed, packed

SIZE = 24


def test_each_is_refused_in_words():
    seen = Counter()
    for kind, data in malformed(6000, SIZE):
        try:
            flat = load_adapter(data, SIZE)
        except InvalidUpload as error:
            words = len(error.detail.split())
            seen[kind] += words > 3
        else:
            # Finite, so a reader has to take it; `upload_rms_limit` is what refuses it.
            assert kind == "values", (kind, data)
            assert abs(flat).max() > 1e38, data
    assert len(seen) == len(KINDS)
    assert min(seen.values()) > 200


def test_the_same_size_done_right_is_taken():
    assert load_adapter(good(SIZE), SIZE).shape == (SIZE,)


def test_a_header_may_not_be_most_of_the_file():
    """With a large program the whole file may be large, and so could a header be that a parser must hold."""
    size = 1 << 20
    header = b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(300_000)) + b"}}"
    data = packed(header, b"")
    assert HEADER_BYTES < len(header) < 4 * size
    tracemalloc.start()
    with pytest.raises(InvalidUpload, match="header"):
        load_adapter(data, size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_length_that_lies_costs_no_memory():
    tracemalloc.start()
    for length in (2**63, 2**64 - 1, 2**40):
        with pytest.raises(InvalidUpload):
            load_adapter(packed(b"{}", b"", length), SIZE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
