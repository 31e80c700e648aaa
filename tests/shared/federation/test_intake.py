"""Valid and invalid update files: reading, hashing and validation, alone and through `FileSource`."""

import hashlib
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidUpload
from shared.federation.aggregation import Weighting, combine
from shared.federation.cohort import AggregatorSettings
from shared.federation.files import FileSource, UploadedFile
from shared.federation.intake import READ_ELEMENTS, UpdateRequirements, read_update
from shared.federation.sources import MemorySource
from shared.federation.update import Contribution, Update, euclidean_norm
from shared.zo.lora import adapter_file, dump_adapter, load_adapter
from tests.shared.adapter_fuzz import malformed

A = "a" * 64
SIZE = 2 * READ_ELEMENTS + 8192 + 5  # three reads, complete rows of dot products and a remainder


def vector(seed, size=SIZE, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)


def file_of(flat, a_sha256=A):
    return adapter_file(flat, job_id="job", recipe_id="0" * 64, a_sha256=a_sha256, step=3)


def read(data, requirements=None, start=None, sha256=None):
    requirements = requirements or UpdateRequirements(SIZE, A)
    start = np.zeros(requirements.size, np.float32) if start is None else start
    out = np.empty(requirements.size, np.float32)
    norm = read_update(io.BytesIO(data), sha256 or hashlib.sha256(data).hexdigest(), requirements, start, out)
    return out, norm


def test_the_update_is_b_minus_its_start_and_its_norm_is_known():
    flat, start = vector(1), vector(2)
    update, norm = read(file_of(flat), start=start)
    assert update.tobytes() == (flat - start).tobytes()
    assert norm == pytest.approx(np.linalg.norm((flat - start).astype(np.float64)), rel=1e-12)
    assert norm == euclidean_norm(flat - start)  # bit for bit: an update within a limit stays within it


@pytest.mark.parametrize(
    ("data", "requirements", "message"),
    [
        (file_of(vector(1))[:-1], None, "truncated"),
        (file_of(vector(1))[:4], None, "header has"),
        (file_of(vector(1)) + b"\0", None, "extra bytes"),
        (file_of(vector(1, SIZE - 1)), None, f"of {SIZE} F32"),
        (file_of(vector(1), "b" * 64), None, f"another A: its fingerprint is {'b' * 64}"),
        (dump_adapter(vector(1), {}), None, "its fingerprint is None"),
        (dump_adapter(vector(1), {"mobizo": "[]"}), None, "its fingerprint is None"),
        (dump_adapter(vector(1), {"mobizo": "[" * 3900}), None, "its fingerprint is None"),
        (file_of(vector(1, scale=9)), UpdateRequirements(SIZE, A, norm_limit=2000.0), "has a norm of 2"),
        (b"\xff\xff\0\0\0\0\0\0" + bytes(70000), None, "65535 bytes; at most 4096"),
        (b"\x02\0\0\0\0\0\0\0[]", None, "exactly one tensor"),
        (b"\x02\0\0\0\0\0\0\0{]", None, "not valid JSON;"),
    ],
)
def test_bad_files_are_refused_by_name(data, requirements, message):
    with pytest.raises(InvalidUpload, match=message):
        read(data, requirements)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, READ_ELEMENTS, SIZE - 1])
def test_nonfinite_values_are_rejected_at_any_index(value, index):
    flat = vector(1)
    flat[index] = value
    with pytest.raises(InvalidUpload, match="not finite"):
        read(file_of(flat))


def test_a_difference_that_overflows_float32_is_rejected():
    big = np.full(SIZE, 3e38, np.float32)
    with pytest.raises(InvalidUpload, match="not finite"):
        read(file_of(big), start=-big)
    assert read(file_of(big))[1] == pytest.approx(3e38 * SIZE**0.5)


@given(st.integers(0, 8191))
def test_a_flipped_bit_is_detected(index):
    requirements, flat = UpdateRequirements(2000), vector(1, 2000)
    data = bytearray(dump_adapter(flat, {}))
    data[index % len(data)] ^= 1
    with pytest.raises(InvalidUpload):
        read(bytes(data), requirements, sha256=hashlib.sha256(dump_adapter(flat, {})).hexdigest())


def test_read_update_rejects_the_files_that_load_adapter_rejects():
    """`load_adapter`, which the upload endpoint uses, is the reference: both accept and reject the same files."""
    accepted = 0
    for kind, data in malformed(3000, 24):
        try:
            expected = load_adapter(data, 24)
        except InvalidUpload:
            with pytest.raises(InvalidUpload):
                read(data, UpdateRequirements(24))
        else:
            accepted += 1
            assert kind == "values"
            assert read(data, UpdateRequirements(24))[0].tobytes() == expected.tobytes()
    assert accepted > 20


@pytest.fixture
def round_of_files(tmp_path):
    """Returns (entries, opener, the same updates in memory) of thirteen files on disk, of members in random order."""
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
def test_files_and_memory_give_equal_results_bit_for_bit(round_of_files, threads, name):
    entries, opener, updates = round_of_files
    settings = AggregatorSettings(name=name, clip_norm=384.0, krum_f=2)
    weighting = Weighting(weights="examples" if name == "mean" else "equal")
    result = combine(FileSource(entries, UpdateRequirements(SIZE, A), opener, threads), settings, weighting)
    expected = combine(MemorySource(updates), settings, weighting)
    assert result.update.tobytes() == expected.update.tobytes()
    assert 0 < result.clipped == expected.clipped < result.count == 13


def test_a_damaged_file_names_its_member_and_fails_the_round(round_of_files, tmp_path):
    entries, opener, _ = round_of_files
    bad = next(entry for entry in entries if entry.contribution.member == "m07")
    data = bytearray((tmp_path / bad.sha256).read_bytes())
    data[-1] ^= 1
    (tmp_path / bad.sha256).write_bytes(data)
    with pytest.raises(InvalidUpload, match=r"^m07: .*is damaged"):
        combine(FileSource(entries, UpdateRequirements(SIZE, A), opener), AggregatorSettings(), Weighting())


def test_the_header_may_be_ordered_otherwise():
    """Other writers put the metadata last and insert spaces."""
    flat = vector(3, 8)
    about = {"lora_B": {"shape": [8], "dtype": "F32", "data_offsets": [0, 32]}, "__metadata__": {"by": "hand"}}
    header = json.dumps(about).encode()
    data = len(header).to_bytes(8, "little") + header + flat.tobytes()
    assert read(data, UpdateRequirements(8))[0].tobytes() == load_adapter(data, 8).tobytes()
