"""The bundle for Jetson and Android: what is in it, and what it computes under emulation.

The processor is always cortex-a76: qemu 7.2 computes wrong int8 losses with `max`, whose SME XNNPACK then uses.
"""

import os
import re
import shlex
import shutil
import subprocess

import numpy as np
import pytest

from device_agent.engines.child_process import NativeEngine, prepare
from device_agent.runner.archive import pack_runner, unpack_runner
from device_agent.training.journal import RunDirectory
from server.catalog.runner_builds.archive import read_archive
from shared.elf import HEADER_BYTES, elf_machine
from tests.device_agent.engines.runs import ledger
from tests.device_agent.engines.test_contract import (
    SETTINGS,
    test_a_diverging_run_ends_with_its_reason,
    test_a_torn_ledger_loses_its_last_frame_only,
    test_another_runs_ledger_is_refused,
)
from tests.device_agent.native import built_bundle

__all__ = [
    "test_a_diverging_run_ends_with_its_reason",
    "test_a_torn_ledger_loses_its_last_frame_only",
    "test_another_runs_ledger_is_refused",
]

pytestmark = pytest.mark.slow

EMULATOR, PROCESSOR = "qemu-aarch64", "cortex-a76"
MOST_BYTES = 25 << 20
LOADER = "lib/ld-linux-aarch64.so.1"
SHORT = SETTINGS | {"steps": 8, "evaluation_interval": 8}
RUNNER_FILES = ("trajectory.bin", "best.f32", "last.f32")
# What cpuinfo reads; where it fails, XNNPACK is unavailable.
KERNEL_FILES = {
    "sys/devices/system/cpu/possible": "0-1\n",
    "sys/devices/system/cpu/present": "0-1\n",
    "proc/cpuinfo": "".join(f"processor: {n}\nCPU implementer: 0x41\nCPU part: 0xd0b\n\n" for n in range(2)),
}
# Registers the emulator in namespaces of its own, as Debian's qemu-user-static does for a whole machine, then starts
# the rest in a new root.
IN_ROOT = r"""
set -e
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
printf '%s' ':emulated:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'\
':\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'":$1:OCF" \
  > /proc/sys/fs/binfmt_misc/register
shift
exec chroot "$@"
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The bundle as a device unpacks it."""
    place = tmp_path_factory.mktemp("bundle")
    archive = place / "runner.tar.gz"
    pack_runner(built_bundle(place / "built"), archive)
    read_archive(archive, ["linux-aarch64", "android-arm64"])
    unpack_runner(archive, place / "unpacked")
    return place / "unpacked"


@pytest.fixture(scope="module")
def emulator():
    path = shutil.which(EMULATOR)
    if path is None:
        pytest.skip(f"{EMULATOR} is not on this machine: `apt install qemu-user`")
    return path


@pytest.fixture(scope="module")
def native(bundle, emulator, tmp_path_factory):
    """The native engine over the emulated runner, started by the bundle's loader as the launcher does."""
    directory = tmp_path_factory.mktemp("emulated")
    words = [
        emulator,
        "-cpu",
        PROCESSOR,
        bundle / LOADER,
        "--library-path",
        bundle / "lib",
        bundle / "bin/mobizo-runner",
    ]
    program = directory / "mobizo-runner"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    program.chmod(0o755)
    return NativeEngine(directory)


@pytest.fixture
def begun(rademacher, dataset, run):
    run.begin(rademacher.plan(dataset, **SHORT))
    return run


@pytest.fixture
def long(begun):
    """The contract's long run: long enough under emulation."""
    return begun


def read_elf(path, *options):
    command = ["aarch64-linux-gnu-readelf", "--wide", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_bundle_is_complete_small_and_starts_without_the_devices_libraries(bundle):
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    licenses = {path.name for path in files if path.parent.name == "licenses"}
    assert licenses >= {"NOTICE.txt", "LGPL-2.1.txt", "GPL-3.txt", "glibc.txt", "gcc.txt", "executorch.txt"}
    notice = (bundle / "licenses/NOTICE.txt").read_text()
    assert re.search(r"libc6-arm64-cross \S+, built from .*glibc \(= ", notice)
    programs = [path for path in files if path.parent.name != "licenses"]
    for path in programs:
        with path.open("rb") as file:
            assert elf_machine(file.read(HEADER_BYTES)) == "aarch64", path
        libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", read_elf(path, "--dynamic"))
        assert all((bundle / "lib" / name).exists() for name in libraries), path
        segments = re.findall(r"^ +LOAD .* (0x[0-9a-f]+)$", read_elf(path, "--segments"), re.MULTILINE)
        assert segments
        assert all(int(alignment, 16) >= 1 << 14 for alignment in segments), path  # phones with pages of 16 KiB
    launcher = read_elf(bundle / "mobizo-runner", "--segments", "--dynamic")
    assert "INTERP" not in launcher
    assert "NEEDED" not in launcher
    assert all(os.access(bundle / name, os.X_OK) for name in ("mobizo-runner", "bin/mobizo-runner", LOADER))


def test_the_launcher_keeps_its_name_and_starts_the_bundles_loader(bundle, emulator, tmp_path):
    """The kernel here cannot start the loader, so the launcher also tells why it failed."""
    link = tmp_path / "linked"
    link.symlink_to(bundle / "mobizo-runner")
    command = [emulator, "-cpu", PROCESSOR, "-strace", "-0", "some-name", link, "version", "two words"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    (words,) = re.findall(r"execve\((.*),NULL\}\)", process.stderr)
    expected = [bundle / LOADER, "some-name", "--argv0", "some-name", "--library-path", bundle / "lib"]
    expected += [bundle / "bin/mobizo-runner", "version", "two words"]
    assert re.findall(r'"([^"]*)"', words) == [str(word) for word in expected]
    assert process.returncode == 126
    assert "Exec format error" in process.stderr


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_it_trains_as_x86_does_and_numpy_replays_it(
    precision, compile_tiny, rademacher, dataset, tmp_path, native, runner_directory
):
    program = rademacher if precision == "fp32" else compile_tiny("int8", precision=precision)
    losses = {}
    for name, engine in (("here", NativeEngine(runner_directory)), ("emulated", native)):
        run, losses[name] = train(engine, program.plan(dataset, **SHORT), tmp_path / name)
    assert losses["emulated"][0] == pytest.approx(losses["here"][0], rel=1e-5)
    b = ledger(run).replay(np.zeros(program.manifest.size, np.float32))
    assert b.tobytes() == (run.path / "last.f32").read_bytes()


def test_exact_gradients_are_those_of_x86(gradient, dataset, tmp_path, native, runner_directory):
    plan = gradient.plan(dataset, **SHORT | {"lr": 0.02})
    run, here = train(NativeEngine(runner_directory), plan, tmp_path / "here")
    emulated_run, emulated = train(native, plan, tmp_path / "emulated")
    np.testing.assert_allclose(emulated[:3], here[:3], rtol=1e-5)
    one, other = (np.fromfile(directory.path / "last.f32", np.float32) for directory in (run, emulated_run))
    np.testing.assert_allclose(one, other, atol=1e-3)


def train(engine, plan, directory):
    """A finished run and the loss of each step."""
    run, losses = RunDirectory(directory), {}
    run.begin(plan)
    message = engine.train(run, lambda progress: losses.update({progress.step: progress.loss}), lambda: False)
    assert message.result is not None
    return run, [loss for step, loss in sorted(losses.items()) if step > 0]


def test_it_trains_to_the_same_bytes_in_a_root_with_nothing_else(bundle, emulator, begun, native, rademacher, tmp_path):
    """From its launcher on. The root also has the emulator's x86-64 libraries, which no aarch64 program can load."""
    root = tmp_path / "root"
    for name in ("bundle", "program", "run"):
        (root / name).mkdir(parents=True)
    shutil.copytree(bundle, root / "bundle", dirs_exist_ok=True)
    shutil.copytree(rademacher.directory, root / "program", dirs_exist_ok=True)
    for name, text in KERNEL_FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for library in re.findall(r"/\S+", subprocess.run(["ldd", emulator], capture_output=True, text=True).stdout):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    assert prepare(begun) is None
    shutil.copytree(begun.path, root / "run", dirs_exist_ok=True)
    plan = begun.plan()
    files = ["--program", f"/program/{plan.program.name}", "--weights", f"/program/{plan.weights.name}"]
    words = ["/bundle/mobizo-runner", "train", "--run", "/run", *files]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", IN_ROOT, "sh", emulator, root, *words]
    process = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "QEMU_CPU": PROCESSOR}, capture_output=True, text=True, check=False
    )
    if re.search(r"unshare|binfmt_misc", process.stderr):
        pytest.skip(f"this machine registers no emulator in a namespace (Linux 6.7 or later does): {process.stderr}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert native.train(begun, lambda _progress: None, lambda: False).result is not None
    for name in RUNNER_FILES:
        assert (root / "run" / name).read_bytes() == (begun.path / name).read_bytes(), name
