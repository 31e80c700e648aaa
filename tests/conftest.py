"""Settings of the whole test run, and the compiled programs that all tests share."""

import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.programs import cache_directory, remove_unused, shared_store

# Without bytecode on disk, each of the hundreds of processes that tests start would compile our packages anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# There are more test processes than cores, so that threads of one tiny product mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("tests.server.actors")
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


MEMORY, ROOM = Path("/dev/shm"), 8 << 30  # bytes; a whole run leaves a fourth of it
TESTS = Path(__file__).parent
# Files that take minutes, the longest first; measured.
LONGEST = (
    "examples/test_demo.py",
    "server/compiler/test_gradient_step.py",
    "server/jobs/test_memory.py",
    "server/registry/exports/test_smollm2.py",
    "device_agent/android/test_launcher.py",
    "server/operations/test_topology.py",
    "server/compiler/test_private_step.py",
    "server/compiler/methods/test_inference.py",
    "device_agent/test_with_server.py",
    "device_agent/jobs/test_federation.py",
    "server/compiler/test_architectures.py",
    "device_agent/daemon/test_faults.py",
    "device_agent/executors/test_contract.py",
    "server/compiler/test_peft.py",
    "simulation/test_command.py",
    "simulation/test_simulation.py",
    "server/web/test_schemathesis.py",
    "server/cli/test_compile.py",
)
PLACES = {TESTS / name: place for place, name in enumerate(LONGEST)}


def pytest_configure(config):
    """Tests' directories lie in memory where there is room: a journal that is synced at every step waits for disks.

    What they test of durability is the death of processes, which a file in memory outlives as one on a disk does.
    """
    if runs_programs(MEMORY) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    # A shell's background jobs ignore Ctrl-C, and so would every command that tests press it in.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        remove_unused(cache_directory() / "programs")


@pytest.hookimpl(optionalhook=True)  # without xdist there is none
def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests wait for timers and for processes for a sixth of their time."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


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
def program_store():
    """Returns the compiled programs that all workers and later runs share."""
    return shared_store()
