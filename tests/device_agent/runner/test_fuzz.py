"""The native runner's reader of requests under AddressSanitizer and UndefinedBehaviorSanitizer.

`fuzz/main.cpp` says what a case is and what counts as a finding. MOBIZO_FUZZ_SECONDS runs new cases for that time
instead of a fixed number (`make fuzz`).
"""

import hashlib
import json
import os
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
    """Runs the fuzzer with these options; returns the finished process."""

    def run(*options):
        command = [fuzzer, "--directory", tmp_path, *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")

    return run


def test_no_request_breaks_the_runner(fuzz):
    budget = ("--seed", time.time_ns(), "--seconds", SECONDS) if SECONDS > 0 else ("--seed", 1, "--cases", CASES)
    process = fuzz(*budget)
    sys.stderr.write(f"{budget}: {process.stdout}")
    assert process.returncode == 0, (budget, process.stderr[-6000:])
    summary = json.loads(process.stdout)
    # Every fourth case is valid; mutated cases of both kinds were run.
    assert summary["cases"] * 0.3 < summary["completed"] < summary["cases"] * 0.9


def test_a_read_beyond_the_end_is_found_and_its_case_is_kept(fuzz, tmp_path):
    case = struct.pack("<I4sIBIIf", 4, b"load", 1, 0, 1, 1, 1.5)
    (tmp_path / "case").write_bytes(case)
    assert fuzz("--replay", tmp_path / "case").stdout == "all requests are well-formed\n"
    (tmp_path / "cut").write_bytes(case[:-1])
    assert fuzz("--replay", tmp_path / "cut").stdout == "a request is malformed\n"
    process = fuzz("--replay", tmp_path / "case", "--overrun")
    assert process.returncode != 0
    assert "heap-buffer-overflow" in process.stderr
    assert (tmp_path / "kept").read_bytes() == case
