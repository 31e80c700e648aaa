"""Files as devices send them, and as they must not: read, hashed, checked; and all of it through a whole source."""

import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidUpload
from shared.federation.aggregation import Weighing, combine
from shared.federation.cohort import AggregatorSettings
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import READ, Rules, read_update
from shared.federation.sources import MemorySource
from shared.federation.update import Contribution, Update, euclidean_norm
from shared.zo.lora import adapter_file, dump_adapter, load_adapter
from tests.shared.adapter_fuzz import malformed

A = "a" * 64
SIZE = 2 * READ + 8192 + 5  # three reads, whole rows of dot products and a rest


def vector(seed, size=SIZE, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)


def file_of(flat, a_sha256=A):
    return adapter_file(flat, job_id="job", recipe_id="0" * 64, a_sha256=a_sha256, step=3)


def read(data, rules=None, start=None, sha256=None):
    rules = rules or Rules(SIZE, A)
    start = np.zeros(rules.size, np.float32) if start is None else start
    out = np.empty(rules.size, np.float32)
    norm = read_update(io.BytesIO(data), sha256 or hashlib.sha256(data).hexdigest(), rules, start, out)
    return out, norm


def test_the_update_is_b_minus_its_start_and_its_norm_is_known():
    flat, start = vector(1), vector(2)
    found, norm = read(file_of(flat), start=start)
    assert found.tobytes() == (flat - start).tobytes()
    assert norm == pytest.approx(np.linalg.norm((flat - start).astype(np.float64)), rel=1e-12)
    assert norm == euclidean_norm(flat - start)  # to the bit: what passed a limit once passes it again


@pytest.mark.parametrize(
    ("data", "rules", "why"),
    [
        (file_of(vector(1))[:-1], None, "truncated"),
        (file_of(vector(1))[:4], None, "header has"),
        (file_of(vector(1)) + b"\0", None, "extra bytes"),
        (file_of(vector(1, SIZE - 1)), None, f"of {SIZE} F32"),
        (file_of(vector(1), "b" * 64), None, f"another A: its fingerprint is {'b' * 64}"),
        (dump_adapter(vector(1), {}), None, "its fingerprint is None"),
        (dump_adapter(vector(1), {"mobizo": "[]"}), None, "its fingerprint is None"),
        (dump_adapter(vector(1), {"mobizo": "[" * 3900}), None, "its fingerprint is None"),
        (file_of(vector(1, scale=9)), Rules(SIZE, A, norm_limit=2000.0), "has a norm of 2"),
        (b"\xff\xff\0\0\0\0\0\0" + bytes(70000), None, "65535 bytes; at most 4096"),
        (b"\x02\0\0\0\0\0\0\0[]", None, "exactly one tensor"),
        (b"\x02\0\0\0\0\0\0\0{]", None, "not valid JSON;"),
    ],
)
def test_bad_files_are_refused_by_name(data, rules, why):
    with pytest.raises(InvalidUpload, match=why):
        read(data, rules)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, READ, SIZE - 1])
def test_what_is_not_finite_is_refused_wherever_it_is(value, at):
    flat = vector(1)
    flat[at] = value
    with pytest.raises(InvalidUpload, match="not finite"):
        read(file_of(flat))


def test_a_difference_beyond_float32_is_refused_and_the_largest_within_is_not():
    big = np.full(SIZE, 3e38, np.float32)
    with pytest.raises(InvalidUpload, match="not finite"):
        read(file_of(big), start=-big)
    assert read(file_of(big))[1] == pytest.approx(3e38 * SIZE**0.5)


@given(st.integers(0, 8191))
def test_a_bit_that_turned_is_found(at):
    rules, flat = Rules(2000), vector(1, 2000)
    data = bytearray(dump_adapter(flat, {}))
    data[at % len(data)] ^= 1
    with pytest.raises(InvalidUpload):
        read(bytes(data), rules, sha256=hashlib.sha256(dump_adapter(flat, {})).hexdigest())


def test_what_the_upload_refuses_is_refused_here():
    """The reader at the endpoint is the reference: nothing that it takes or refuses is judged otherwise here."""
    taken = 0
    for kind, data in malformed(3000, 24):
        try:
            expected = load_adapter(data, 24)
        except InvalidUpload:
            with pytest.raises(InvalidUpload):
                read(data, Rules(24))
        else:
            taken += 1
            assert kind == "values"
            assert read(data, Rules(24))[0].tobytes() == expected.tobytes()
    assert taken > 20


@pytest.fixture
def round_of_files(tmp_path):
    """Thirteen files on disk, of members in no order: (entries, opener, the same updates in memory)."""
    start, entries, updates = vector(100), [], []
    for number in np.random.default_rng(0).permutation(13):
        data = file_of(vector(int(number)))
        sha256 = hashlib.sha256(data).hexdigest()
        (tmp_path / sha256).write_bytes(data)
        who = Contribution(f"m{number:02}", examples=int(number) + 1)
        entries.append(UploadedFile(who, sha256, start))
        updates.append(Update(who.member, vector(int(number)) - start, who.examples))
    return entries, lambda sha256: (tmp_path / sha256).open("rb", buffering=0), updates


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", ["mean", "median", "trimmed_mean", "multi_krum"])
def test_files_give_what_memory_gives_to_the_bit(round_of_files, threads, name):
    entries, opener, updates = round_of_files
    settings = AggregatorSettings(name=name, clip_norm=384.0, krum_f=2)
    weighing = Weighing(by="examples" if name == "mean" else "equal")
    found = combine(FileSource(entries, Rules(SIZE, A), opener, threads), settings, weighing)
    expected = combine(MemorySource(updates), settings, weighing)
    assert found.update.tobytes() == expected.update.tobytes()
    assert 0 < found.clipped == expected.clipped < found.count == 13


def test_a_damaged_file_names_its_member_and_nothing_comes_of_the_round(round_of_files, tmp_path):
    entries, opener, _ = round_of_files
    bad = next(entry for entry in entries if entry.contribution.member == "m07")
    data = bytearray((tmp_path / bad.sha256).read_bytes())
    data[-1] ^= 1
    (tmp_path / bad.sha256).write_bytes(data)
    with pytest.raises(InvalidUpload, match=r"^m07: .*is damaged"):
        combine(FileSource(entries, Rules(SIZE, A), opener), AggregatorSettings(), Weighing())


def test_a_large_b_is_read_one_at_a_time(round_of_files, monkeypatch):
    entries, opener, updates = round_of_files
    monkeypatch.setattr("shared.federation.files.MOST_AHEAD_BYTES", 1)
    found = combine(FileSource(entries, Rules(SIZE, A), opener), AggregatorSettings(), Weighing())
    assert found.update.tobytes() == combine(MemorySource(updates), AggregatorSettings(), Weighing()).update.tobytes()


def test_a_start_of_another_size_and_a_member_twice(round_of_files):
    entries, opener, _ = round_of_files
    with pytest.raises(ValueError, match="D = 7"):
        FileSource(entries, Rules(7), opener)
    with pytest.raises(ValueError, match="more than one"):
        FileSource([*entries, entries[0]], Rules(SIZE), opener)


def test_the_header_may_be_ordered_otherwise():
    """Files of other writers: metadata last, spaces between."""
    flat = vector(3, 8)
    about = {"lora_B": {"shape": [8], "dtype": "F32", "data_offsets": [0, 32]}, "__metadata__": {"by": "hand"}}
    header = json.dumps(about).encode()
    data = len(header).to_bytes(8, "little") + header + flat.tobytes()
    assert read(data, Rules(8))[0].tobytes() == load_adapter(data, 8).tobytes()
