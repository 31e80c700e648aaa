"""The native runner's code under AddressSanitizer and UndefinedBehaviorSanitizer, on valid and mutated files.

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

from device_agent.errors import NoRunner
from device_agent.runner.location import SOURCES, sources_sha256
from device_agent.runner.toolchain import check_compiler, find_cmake, find_generator
from tests.device_agent.native import tools_on_path
from tests.programs import cache_directory, held

FUZZ = Path(__file__).parent / "fuzz"
SECONDS = float(os.environ.get("MOBIZO_FUZZ_SECONDS", "0"))
CASES = 8_000
BEHAVIOUR = struct.Struct("<8i")  # of the program's double, `Behaviour` in fuzz/cases.hpp
OVERRUN = 7  # place in it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 900)]


@pytest.fixture(scope="session")
def fuzzer():
    """The fuzzer's program, built once for its sources and the runner's."""
    try:
        check_compiler()
    except NoRunner as error:
        pytest.skip(error.detail)
    sources = hashlib.sha256((sources_sha256(SOURCES) + sources_sha256(FUZZ)).encode()).hexdigest()[:16]
    place = cache_directory() / "fuzzers"
    place.mkdir(parents=True, exist_ok=True)
    build = place / sources
    with held(place / "lock"), pytest.MonkeyPatch.context() as monkeypatch:
        if not (build / "mobizo-fuzz").exists():
            for other in place.iterdir():
                if other.is_dir():
                    shutil.rmtree(other)
            tools_on_path(monkeypatch)
            cmake, (generator, _) = find_cmake(), find_generator()
            subprocess.run(
                [cmake, "-S", FUZZ, "-B", build, "-G", generator, f"-DRUNNER={SOURCES}"], check=True, timeout=300
            )
            subprocess.run([cmake, "--build", build, "--parallel", str(os.cpu_count() or 1)], check=True, timeout=900)
    return build / "mobizo-fuzz"


@pytest.fixture
def fuzz(fuzzer, tmp_path):
    """Runs the fuzzer with these options; returns the finished process."""

    def run(*options):
        command = [fuzzer, "--directory", tmp_path, *map(str, options)]
        return subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")

    return run


def test_no_file_breaks_the_runner(fuzz):
    budget = ("--seed", time.time_ns(), "--seconds", SECONDS) if SECONDS > 0 else ("--seed", 1, "--cases", CASES)
    process = fuzz(*budget)
    sys.stderr.write(f"{budget}: {process.stdout}")
    assert process.returncode == 0, (budget, process.stderr[-6000:])
    summary = json.loads(process.stdout)
    # Every sixteenth case is valid, and most mutated ones are refused: both kinds were run.
    assert summary["completed"] > summary["cases"] / 16
    assert summary["failed"] > summary["cases"] / 16


def test_cases_depend_on_the_seed_alone(fuzz):
    runs = [json.loads(fuzz("--seed", seed, "--cases", 500).stdout) for seed in (2, 2, 3)]
    first, second, other = ({name: count for name, count in run.items() if name != "seconds"} for run in runs)
    assert first == second != other


@pytest.fixture
def case(tmp_path):
    """A case that generates one token with a program of 2 numbers."""
    place = tmp_path / "case"
    place.mkdir()
    words = ["generate", "--program", "@/program", "--weights", "@/weights", "--adapter", "@/b.f32"]
    words += ["--tokens", "1", "--most", "1", "--length", "1", "--context", "1"]
    (place / "arguments").write_text("".join(f"{word}\n" for word in words))
    (place / "program").write_bytes(BEHAVIOUR.pack(2, 2, 0, 9, 0, 0, 0, 0))
    (place / "b.f32").write_bytes(bytes(8))
    return place


def test_a_read_beyond_the_end_is_found_and_its_case_is_kept(fuzz, case, tmp_path):
    behaviour = list(BEHAVIOUR.unpack((case / "program").read_bytes()))
    behaviour[OVERRUN] = 1
    (case / "program").write_bytes(BEHAVIOUR.pack(*behaviour))
    process = fuzz("--replay", case)
    assert process.returncode != 0
    assert "heap-buffer-overflow" in process.stderr
    assert (tmp_path / "kept" / "program").read_bytes() == (case / "program").read_bytes()
