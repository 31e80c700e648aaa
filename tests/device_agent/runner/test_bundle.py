"""The runner's bundles: what is in them, and that they compute the same with nothing but a kernel around them.

The bundle for this machine is the installed one. The one for aarch64 is built and runs in an emulator, always as a
cortex-a76: qemu 7.2 computes wrong int8 losses with `max`, whose SME XNNPACK then uses.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from device_agent.executors.program import Rates
from shared.zo.encoding import load_examples
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_step
from shared.zo.trajectory import Trajectory
from tests.device_agent.native import built_wheels, opened_by_runner
from tests.device_agent.tiny import TASK

MAX_BYTES = 25 << 20
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
CROSS_COMPILER, EMULATORS, PROCESSOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "qemu-aarch64-static"), "cortex-a76"
STEPS, LR, EPS = 3, 0.05, 0.01
# What cpuinfo reads; where it fails, XNNPACK is unavailable.
KERNEL_FILES = {
    "sys/devices/system/cpu/possible": "0-1\n",
    "sys/devices/system/cpu/present": "0-1\n",
    "proc/cpuinfo": "".join(f"processor: {n}\nCPU implementer: 0x41\nCPU part: 0xd0b\n\n" for n in range(2)),
}
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels for aarch64, built here."""
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"{CROSS_COMPILER} is not on this machine: `apt install g++-aarch64-linux-gnu`")
    return built_wheels(tmp_path_factory.mktemp("wheels"), "aarch64")


@pytest.fixture(scope="module")
def aarch64_bundle(wheels, tmp_path_factory):
    """The bundle of the phone's package, as pip installs it."""
    packages = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages]
    subprocess.run([*command, wheels["mobizo_runner_phone", "any"]], check=True)
    return packages / "mobizo_runner_phone" / "bundle"


@pytest.fixture(params=["installed", pytest.param("aarch64", marks=pytest.mark.slow)])
def bundle(request):
    return request.getfixturevalue("runner_directory" if request.param == "installed" else "aarch64_bundle")


@pytest.fixture(scope="module")
def emulator():
    paths = [path for path in map(shutil.which, EMULATORS) if path]
    if not paths:
        pytest.skip(f"{EMULATORS[0]} is not on this machine: `apt install qemu-user`")
    return paths[0]


@pytest.fixture(scope="module")
def emulated(aarch64_bundle, emulator, tmp_path_factory):
    """The directory of a runner that starts the emulated one by the bundle's loader, as the launcher does."""
    libraries = aarch64_bundle / "lib"
    words = [libraries / LOADERS["aarch64"], "--library-path", libraries, aarch64_bundle / "bin/mobizo-runner"]
    return script(tmp_path_factory.mktemp("emulated"), emulator, "-cpu", PROCESSOR, *words)


def script(directory, *words):
    """A directory with a `mobizo-runner` that runs these words and its own arguments."""
    program = directory / "mobizo-runner"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    program.chmod(0o755)
    return directory


def empty_root(directory, bundle, program):
    """A root directory that has a bundle, a program and the few files of a kernel."""
    shutil.copytree(bundle, directory / "bundle")
    (directory / "program").mkdir()
    for role in ("program", "weights"):
        shutil.copy(program.path(role), directory / "program")
    for name, text in KERNEL_FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def read_elf(path, *options):
    return subprocess.run(["readelf", "--wide", *options, path], capture_output=True, text=True, check=True).stdout


def train(program, dataset, runner, in_root=False):
    """The losses of a few steps, their coefficients, and B; by gradients, these are loss and norm."""
    recipe, paths = program.manifest.recipe, [program.path(role) for role in ("program", "weights")]
    if in_root:
        paths = [Path("/program") / path.name for path in paths]
    examples = load_examples(dataset / "train.jsonl", TASK, program.tokenizer, recipe)
    batch = pack_step(examples[: recipe.effective_batch], recipe)
    with closing(opened_by_runner(program.manifest, runner, *paths)) as runtime:
        if recipe.estimator == "gradient":
            steps = [runtime.gradient_step(batch, Rates(0.02)) for _ in range(STEPS)]
        else:
            steps = [runtime.step(batch, query_seeds(5, step, recipe.queries), LR, EPS) for step in range(STEPS)]
        losses, coefficients = ([np.array(values) for values in column] for column in zip(*steps, strict=True))
        return losses, coefficients, runtime.adapter()


def replayed(program, coefficients):
    """B as NumPy computes it from the coefficients."""
    header = program.plan(Path(), seed=5).header
    return Trajectory(header, coefficients).replay(np.zeros(header.size, np.float32))


def elf_machine(path):
    """Returns the machine of an ELF file by its e_machine."""
    return {62: "x86_64", 183: "aarch64"}[int.from_bytes(path.read_bytes()[18:20], "little")]


def test_it_is_complete_small_and_carries_its_licences(bundle):
    machine = elf_machine(bundle / "mobizo-runner")
    files = [path for path in bundle.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    licenses = {path.name for path in files if path.parent.name == "licenses"}
    names = {"NOTICE.txt", "Apache-2.0.txt", "LGPL-2.1.txt", "GPL-3.txt", "glibc.txt", "gcc.txt", "executorch.txt"}
    assert licenses == names | {"mobizo.txt"}
    notice = (bundle / "licenses/NOTICE.txt").read_text()
    assert re.search(r"^  libc6\S* \S+ \(source: .*glibc", notice, re.MULTILINE)
    assert re.search(r"^  libstdc\+\+6\S* \S+ \(source: .*gcc-", notice, re.MULTILINE)
    assert "@" not in notice
    for path in (path for path in files if path.parent.name != "licenses"):
        assert elf_machine(path) == machine, path
        libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", read_elf(path, "--dynamic"))
        assert all((bundle / "lib" / name).exists() for name in libraries), path
        segments = re.findall(r"^ +LOAD .* (0x[0-9a-f]+)$", read_elf(path, "--segments"), re.MULTILINE)
        assert segments
        # Phones may have pages of 16 KiB.
        assert machine != "aarch64" or all(int(alignment, 16) >= 1 << 14 for alignment in segments), path
    launcher = read_elf(bundle / "mobizo-runner", "--segments", "--dynamic")
    assert "INTERP" not in launcher
    assert "NEEDED" not in launcher
    executables = ("mobizo-runner", "bin/mobizo-runner", f"lib/{LOADERS[machine]}")
    assert all(os.access(bundle / name, os.X_OK) for name in executables)


def test_it_starts_wherever_it_is_moved_with_its_own_libraries_and_its_name(runner_directory, rademacher, tmp_path):
    moved = shutil.copytree(runner_directory, tmp_path / "moved")
    link = tmp_path / "link"
    link.symlink_to(moved / "mobizo-runner")
    files = ["--program", rademacher.path("program"), "--weights", rademacher.path("weights")]
    process = subprocess.Popen(
        ["some-name", "serve", *files], executable=link, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}
    )
    with process:
        assert process.stdout.read(1) == b"\0"  # it is loaded
        facts = Path("/proc") / str(process.pid)
        mapped = {line.split()[-1] for line in (facts / "maps").read_text().splitlines() if ".so" in line}
        name = (facts / "cmdline").read_text().split("\0")[0]
        process.stdin.close()
    assert mapped
    assert all(path.startswith(f"{moved}/lib/") for path in mapped)
    assert not [path for path in mapped if re.search(r"libtorch|libpython", path)]
    assert name == "some-name"


def test_it_computes_the_same_bytes_in_a_root_with_nothing_else(runner_directory, rademacher, dataset, tmp_path):
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    root = empty_root(tmp_path / "root", runner_directory, rademacher)
    (tmp_path / "script").mkdir()
    inside = script(tmp_path / "script", *NAMESPACES, "chroot", root, "/bundle/mobizo-runner")
    expected, found = train(rademacher, dataset, runner_directory), train(rademacher, dataset, inside, in_root=True)
    np.testing.assert_equal(found, expected)
    np.testing.assert_array_equal(found[2], replayed(rademacher, found[1]))


@pytest.mark.slow
def test_the_launcher_for_aarch64_starts_the_bundles_loader(aarch64_bundle, emulator, tmp_path):
    """The kernel here cannot start the loader, so the launcher also tells why it failed."""
    link = tmp_path / "linked"
    link.symlink_to(aarch64_bundle / "mobizo-runner")
    command = [emulator, "-cpu", PROCESSOR, "-strace", "-0", "some-name", link, "version", "two words"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    (words,) = re.findall(r"execve\((.*),NULL\}\)", process.stderr)
    loader, libraries = aarch64_bundle / "lib" / LOADERS["aarch64"], aarch64_bundle / "lib"
    expected = [loader, "some-name", "--argv0", "some-name", "--library-path", libraries]
    expected += [aarch64_bundle / "bin/mobizo-runner", "version", "two words"]
    assert re.findall(r'"([^"]*)"', words) == [str(word) for word in expected]
    assert process.returncode == 126
    assert "Exec format error" in process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "gradient"])
def test_aarch64_computes_the_losses_of_this_machine_and_numpy_replays_it(
    request, name, compile_tiny, dataset, emulated, runner_directory
):
    program = compile_tiny(name, precision=name) if name == "int8" else request.getfixturevalue(name)
    here, there = (train(program, dataset, runner) for runner in (runner_directory, emulated))
    np.testing.assert_allclose(there[0][0], here[0][0], rtol=1e-5)
    if name == "gradient":
        np.testing.assert_allclose(there[2], here[2], atol=1e-3)
    else:
        np.testing.assert_array_equal(there[2], replayed(program, there[1]))
