"""Thousands of malformed adapter files are rejected with bounded memory."""

import tracemalloc
from collections import Counter

import pytest

from shared.errors import InvalidUpload
from shared.zo.lora import HEADER_BYTES, load_adapter, map_adapter
from tests.shared.adapter_fuzz import KINDS, malformed, packed

SIZE = 24


def test_each_is_refused_in_words():
    counts = Counter()
    for kind, data in malformed(6000, SIZE):
        try:
            flat = load_adapter(data, SIZE)
        except InvalidUpload as error:
            word_count = len(error.detail.split())
            counts[kind] += word_count > 3
        else:
            # Finite, so the reader accepts it; `upload_rms_limit` rejects it.
            assert kind == "values", (kind, data)
            assert abs(flat).max() > 1e38, data
    assert len(counts) == len(KINDS)
    assert min(counts.values()) > 200


def test_a_file_that_is_not_read_into_memory_is_refused_alike(tmp_path):
    path = tmp_path / "adapter"
    for kind, data in malformed(600, SIZE):
        path.write_bytes(data)
        try:
            expected = load_adapter(data, SIZE)
        except InvalidUpload as error:
            with pytest.raises(InvalidUpload) as refused:
                map_adapter(path, SIZE)
            # safetensors names its reading of a header differently for a file.
            same = refused.value.detail.replace("deserializing header:", "deserializing:") == error.detail
            assert same, (kind, data, refused.value.detail)
        else:
            assert map_adapter(path, SIZE).tobytes() == expected.tobytes(), (kind, data)


def test_a_header_may_not_be_most_of_the_file():
    """The file of a large program is large; its header must still be small."""
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


def test_a_false_length_allocates_no_memory():
    tracemalloc.start()
    for length in (2**63, 2**64 - 1, 2**40):
        with pytest.raises(InvalidUpload):
            load_adapter(packed(b"{}", b"", length), SIZE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
