"""The native runner's reader of requests under AddressSanitizer and UndefinedBehaviorSanitizer.

`fuzz/main.cpp` says what counts as a finding. MOBIZO_FUZZ_SECONDS runs new cases for that time instead of a fixed
number (`make fuzz`).
"""

import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import cache_directory, held

FUZZ = Path(__file__).parent / "fuzz" / "main.cpp"
RUNNER = Path(__file__).parents[3] / "device_agent" / "runner"
SOURCES = (FUZZ, *(RUNNER / name for name in ("connection.cpp", "connection.hpp", "errors.hpp", "tensor.hpp")))
OPTIONS = (
    *("-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS"),
    *("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
)
SECONDS = float(os.environ.get("MOBIZO_FUZZ_SECONDS", "0"))
CASES = 20_000
NUMBERS = (0, 1, 3, 8, 9, 16, 17, 64, 65, 1 << 20, 1 << 30, 2**31 - 1, 2**31, 2**32 - 1)  # near limits and types' ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 900)]


@pytest.fixture(scope="session")
def fuzzer():
    """The fuzzer's program, compiled once for its sources and those of the runner that it includes."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    directory = cache_directory() / "fuzzers"
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / sources
    with held(directory / "lock"):
        if not program.exists():
            temporary = directory / "new"
            command = [compiler, *OPTIONS, f"-I{RUNNER}", FUZZ, RUNNER / "connection.cpp", "-o", temporary]
            subprocess.run(command, check=True, timeout=900)
            temporary.rename(program)
    return program


@pytest.fixture
def fuzz(fuzzer, tmp_path):
    """Runs cases; returns the finished process and, without a finding, whether each case is well-formed and answers."""

    def run(cases, *options):
        (tmp_path / "cases").write_bytes(b"".join(struct.pack("<I", len(case)) + case for case in cases))
        command = [fuzzer, tmp_path / "cases", tmp_path / "answers", *options]
        process = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        data, at, answers = (tmp_path / "answers").read_bytes(), 0, []
        while process.returncode == 0 and at < len(data):
            complete, length = struct.unpack_from("<?I", data, at)
            answers.append((complete, data[at + 5 : at + 5 + length]))
            at += 5 + length
        return process, answers

    return run


def tensors(draw):
    """Random tensors as the protocol has them."""
    count = draw.randrange(5)
    pieces = [struct.pack("<I", count)]
    for _ in range(count):
        kind, rank = draw.randrange(3), draw.randrange(4)
        shape = [2000 if draw.random() < 0.005 else draw.randrange(9) for _ in range(rank)]
        size = 8 if kind == 1 else 4
        for extent in shape:
            size *= extent
        pieces += [struct.pack(f"<BI{rank}I", kind, rank, *shape), draw.randbytes(size)]
    return b"".join(pieces)


def valid_case(draw):
    """Up to five requests, and their answers."""
    requests = [(bytes([109]) * draw.randrange(65), tensors(draw)) for _ in range(draw.randrange(6))]
    case = b"".join(struct.pack("<I", len(name)) + name + inputs for name, inputs in requests)
    return case, b"".join(b"\0" + inputs for _, inputs in requests)


def mutated(case, other, draw):
    """A case with up to four changes, which cut, drop, insert or overwrite."""
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randint(0, len(case)), draw.randrange(41)
        start = draw.randint(0, len(other))
        case = draw.choice(
            (
                case[:at],
                case[:at] + case[at + size :],
                case[:at] + other[start : start + 40] + case[at:],
                case[:at] + draw.randbytes(size) + case[at + size :],
                case[:at] + struct.pack("<I", draw.choice(NUMBERS)) + case[at + 4 :],
            )
        )
    return case


def test_no_request_breaks_the_runner(fuzz):
    seed, deadline = time.time_ns() if SECONDS else 1, time.monotonic() + SECONDS
    while True:
        draw = random.Random(seed)
        valid = [valid_case(draw) for _ in range(CASES // 4)]
        bases = [case for case, _ in valid]
        cases = bases + [mutated(draw.choice(bases), draw.choice(bases), draw) for _ in range(CASES - len(valid))]
        process, answers = fuzz(cases)
        assert process.returncode == 0, (seed, process.stderr[-6000:])
        assert answers[: len(valid)] == [(True, expected) for _, expected in valid]
        completed = sum(complete for complete, _ in answers[len(valid) :])
        sys.stderr.write(f"seed {seed}: {len(cases)} cases, {completed} well-formed after changes\n")
        assert 0 < completed < CASES / 2
        seed += 1
        if time.monotonic() >= deadline:
            return


def test_a_read_beyond_the_end_is_found_and_its_case_is_named(fuzz):
    case = struct.pack("<I4sIBIIf", 4, b"load", 1, 0, 1, 1, 1.5)
    _, answers = fuzz([case, case[:-1]])
    assert answers == [(True, b"\0" + case[8:]), (False, b"")]
    process, _ = fuzz([b"", case], "--overrun")
    assert process.returncode != 0
    assert "heap-buffer-overflow" in process.stderr
    assert "in case 1" in process.stderr
