"""What all tests share: how long a case takes is nothing that they judge, and what was compiled serves them all."""

import gc
import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.programs import ProgramStore, run_directory

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


MEMORY, ROOM = Path("/dev/shm"), 8 << 30  # bytes; a whole run leaves a fourth of it
TESTS = Path(__file__).parent
# Files that take minutes, the longest first; measured.
LONGEST = (
    "examples/test_demo.py",
    "server/compiler/test_inference.py",
    "device_agent/test_with_server.py",
    "device_agent/test_federation.py",
    "server/compiler/test_architectures.py",
    "device_agent/test_faults.py",
    "device_agent/runtimes/test_contract.py",
    "device_agent/engines/test_contract.py",
    "server/compiler/test_peft.py",
    "bench/test_steps.py",
    "server/work/test_engines.py",
    "server/formats/test_smollm2.py",
    "server/compiler/test_program.py",
    "device_agent/adb/test_engine.py",
    "server/compiler/test_quantization.py",
    "simulation/test_command.py",
    "server/http/test_schemathesis.py",
    "simulation/test_private_examples.py",
    "server/test_compile_cli.py",
    "server/test_topology.py",
    "server/test_real_compiler.py",
)
PLACES = {TESTS / name: place for place, name in enumerate(LONGEST)}


def pytest_configure():
    """Tests' directories lie in memory where there is room: a journal that is synced at every step waits for disks.

    What they test of durability is the death of processes, which a file in memory outlives as one on a disk does.
    """
    if runs_programs(MEMORY) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    # A shell's background jobs ignore Ctrl-C, and so would every command that tests press it in.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def runs_programs(directory):
    """Whether files can be made in a directory, and programs among them run."""
    return os.access(directory, os.W_OK) and not os.statvfs(directory).f_flag & os.ST_NOEXEC


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest files come first: no worker is to wait at the end for another's last one."""
    items.sort(key=lambda item: PLACES.get(item.path, len(PLACES)))


def pytest_collection_finish():
    """What was imported by now stays to the end: no collection of garbage need walk through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def program_store(tmp_path_factory):
    """Programs of this run, compiled once for all workers."""
    return ProgramStore(run_directory(tmp_path_factory) / "compiled")
