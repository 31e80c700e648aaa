"""The native runner is the installed package's or the named one, and what is wrong with it is told with a remedy."""

import json
import shutil
from importlib.metadata import version

import pytest

from device_agent.errors import NoRunner
from device_agent.runner.location import PACKAGE, PHONE_PACKAGE, PROGRAM, RUNNER_VARIABLE, find_runner, host_platform

HOST_MACHINE = host_platform().rpartition("-")[2]


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package of a runner, before all others; returns its bundle."""

    def install(name=PACKAGE, release=None, program=None):
        release, package = release or version("mobizo"), name.replace("-", "_")
        described = tmp_path / "packages" / f"{package}-{release}.dist-info"
        bundle = tmp_path / "packages" / package / "bundle"
        described.mkdir(parents=True)
        (bundle / "lib").mkdir(parents=True)
        (bundle / PROGRAM).write_bytes(program or answering())
        (bundle / PROGRAM).chmod(0o755)
        (bundle / "lib" / "libc.so.6").touch()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
        (described / "RECORD").write_text(f"{package}/bundle/{PROGRAM},,\n{package}/bundle/lib/libc.so.6,,\n")
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        return bundle

    return install


def answering(release=None, executorch="1.5.1"):
    """A program that answers `version`."""
    facts = json.dumps({"version": release or version("mobizo"), "executorch": executorch})
    return f"#!/bin/sh\necho '{facts}'\n".encode()


def test_a_named_directory_comes_before_the_package_and_must_have_a_runner(
    install, monkeypatch, runner_directory, tmp_path
):
    elsewhere = shutil.copytree(runner_directory, tmp_path / "elsewhere")
    install(release="0.0.1")
    with pytest.raises(NoRunner, match=rf"mobizo-runner has version 0\.0\.1 and .*pip install .*{version('mobizo')}"):
        find_runner()
    monkeypatch.setenv(RUNNER_VARIABLE, str(elsewhere))
    assert find_runner() == elsewhere

    monkeypatch.setenv(RUNNER_VARIABLE, str(tmp_path))
    with pytest.raises(NoRunner, match=rf"{tmp_path}, which holds no mobizo-runner; correct or unset it"):
        find_runner()


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (host_platform(), f"is not installed: it is in the package {PACKAGE}; `pip install"),
        (
            {"x86_64": "android-arm64", "aarch64": "android-x86_64"}[HOST_MACHINE],
            f"in the package {PHONE_PACKAGE}; `pip",
        ),
        ("linux-riscv64", "no package with a runner for linux-riscv64; build one"),
        ("darwin-arm64", "no package with a runner for darwin-arm64; build one"),
        ("android-arm", "no package with a runner for android-arm; build one"),
    ],
)
def test_a_platform_without_an_installed_package(system, message, monkeypatch, tmp_path):
    described = tmp_path / "mobizo.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mobizo\nVersion: {version('mobizo')}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(NoRunner, match=message):
        find_runner(system)


@pytest.mark.parametrize("name", [PROGRAM, "lib/libc.so.6"])
def test_a_package_without_all_its_files(install, name):
    bundle = install()
    assert find_runner() == bundle
    (bundle / name).unlink()
    with pytest.raises(NoRunner, match=rf"lacks {bundle / name}; `pip install --force-reinstall"):
        find_runner()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            b"#!/bin/sh\necho libc.so.6: missing >&2\nexit 126\n",
            r"does not start on this device: libc\.so\.6: missing",
        ),
        (
            b"no program",
            "does not start on this device: .*Exec format error.*; install mobizo-runner",
        ),
        (b"#!/bin/sh\necho hello\n", "answers 'hello' instead of a version"),
        (answering(release="0.0.1"), r"is of mobizo 0\.0\.1 .* install that version of mobizo-runner"),
        (answering(executorch="1.0.0"), r"ExecuTorch 1\.0\.0; this agent .* needs ExecuTorch 1\.5\.1"),
    ],
    ids=["library", "format", "answer", "version", "executorch"],
)
def test_a_runner_that_does_not_work_here(install, program, message):
    install(program=program)
    with pytest.raises(NoRunner, match=message):
        find_runner()


def test_a_replaced_runner_is_started_again_and_one_of_a_phone_is_never_started_here(install):
    system = {"x86_64": "android-arm64", "aarch64": "linux-x86_64"}[HOST_MACHINE]
    bundle = install(PHONE_PACKAGE, program=b"for another processor")
    assert find_runner(system) == bundle
    bundle = install()
    assert find_runner() == bundle
    (bundle / PROGRAM).write_bytes(answering(release="0.0.1"))
    with pytest.raises(NoRunner, match=r"is of mobizo 0\.0\.1"):
        find_runner()
