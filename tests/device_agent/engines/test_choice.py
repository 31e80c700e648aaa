"""Which engine an agent trains with, and what it says when what was asked for cannot be had."""

from contextlib import closing
from importlib.metadata import version

import psutil
import pytest

from device_agent.engines.adb import AdbEngine
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.engines.choice import (
    EngineName,
    EngineSelector,
    phone_platform,
    platform_name,
)
from device_agent.errors import NoRunner
from device_agent.inference.session import open_inference
from device_agent.runner.location import RUNNER_VARIABLE, RunnerLocation, host_platform, local_runner
from shared.errors import BadRequest
from tests.device_agent.conftest import enroll
from tests.device_agent.fake_server import FakeServer

FOREIGN = b"\x7fELF\2\1\1".ljust(18, b"\0") + b"\xf3\0"  # for RISC-V


@pytest.fixture
def choose(home, server_key, monkeypatch):
    """Chooses for an enrolled home whose server offers no runner, with no compiler on PATH."""
    with FakeServer(server_key) as server:
        enroll(home, server.url, server_key)
        monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
        monkeypatch.setenv("PATH", "")
        yield lambda engine=None: EngineSelector(home, engine)


def test_a_runner_that_is_there_is_used(choose, home, rademacher, runner_directory):
    place = RunnerLocation.within(home.path)
    place.path.parent.mkdir(parents=True)
    place.path.symlink_to(runner_directory)
    assert isinstance(choose()(rademacher.manifest), NativeEngine)
    assert local_runner(home.path) == place.path
    assert isinstance(choose(EngineName.PYTHON)(rademacher.manifest), PythonEngine)


def test_a_runner_made_elsewhere_is_used(choose, rademacher, runner_directory, monkeypatch, tmp_path):
    monkeypatch.setenv(RUNNER_VARIABLE, str(runner_directory))
    assert isinstance(choose()(rademacher.manifest), NativeEngine)
    monkeypatch.setenv(RUNNER_VARIABLE, str(tmp_path))
    with pytest.raises(NoRunner, match="holds no mobizo-runner"):
        choose()(rademacher.manifest)
    (tmp_path / "mobizo-runner").write_bytes(FOREIGN)
    with pytest.raises(NoRunner, match=rf"is for riscv64 and the device is {host_platform()}.*build-runner --platform"):
        choose()(rademacher.manifest)


def test_without_a_runner_python_trains_unless_a_person_wanted_the_runner(choose, home, rademacher):
    assert isinstance(choose()(rademacher.manifest), PythonEngine)
    assert local_runner(home.path) is None
    with pytest.raises(NoRunner, match=r"C\+\+17 compiler.*mobizo-server runner-build add"):
        choose(EngineName.NATIVE)(rademacher.manifest)


def test_a_device_without_any_runtime_says_so(choose, rademacher, monkeypatch):
    monkeypatch.setattr("device_agent.engines.choice.find_spec", lambda _name: None)
    with pytest.raises(NoRunner, match=r"C\+\+17 compiler"):
        choose()(rademacher.manifest)


def test_torchs_programs_are_pythons(choose, rademacher):
    recipe = rademacher.manifest.recipe.model_copy(update={"backend": "torch"})
    manifest = rademacher.manifest.model_copy(update={"recipe": recipe})
    assert isinstance(choose()(manifest), PythonEngine)
    for engine in (EngineName.NATIVE, EngineName.ADB):
        with pytest.raises(BadRequest, match=r"no backend 'torch'.*--engine python"):
            choose(engine)(manifest)


def test_a_phones_engine_takes_a_runner_for_the_phone(home, server_key, adb, rademacher, runner_directory, monkeypatch):
    with FakeServer(server_key) as server:
        enroll(home, server.url, server_key)
        monkeypatch.setenv(RUNNER_VARIABLE, str(runner_directory))
        assert isinstance(EngineSelector(home, phone=adb)(rademacher.manifest), AdbEngine)
    assert phone_platform(adb) == host_platform()  # the tests' phone is no Android


@pytest.mark.parametrize(
    ("abi", "machine", "platform"),
    [
        ("arm64-v8a", "aarch64", "android-arm64"),
        ("armeabi-v7a", "aarch64", "android-arm"),  # a kernel of 64 bits under an Android of 32
        ("x86_64", "x86_64", "android-x86_64"),
        ("", "aarch64", "linux-aarch64"),
    ],
)
def test_a_phones_platform_is_that_of_its_own_programs(abi, machine, platform):
    assert platform_name(abi, machine) == platform


def test_the_runner_predicts_as_python_does(rademacher, runner_directory):
    files = (rademacher.path("inference"), rademacher.path("weights"))
    prompt, candidates = list(range(5, 50)), [[7], [8, 9, 10]]
    with (
        closing(open_inference(rademacher.manifest, *files, runner_directory)) as native,
        closing(open_inference(rademacher.manifest, *files)) as python,
    ):
        # Each has a kernel of its own for attention.
        assert native.score(prompt, candidates) == pytest.approx(python.score(prompt, candidates), rel=1e-6)
        assert list(native.generate(prompt, 6)) == list(python.generate(prompt, 6))


def test_what_it_can_do_is_told_without_getting_anything(choose, home):
    """The runner counts as long as it may be had; only it has the noise operator."""
    with_both = choose().capabilities()
    assert with_both.engines == ("native", "python")
    assert with_both.operators == ("mobizo::noise",)
    assert set(with_both.backends) == {"xnnpack", "portable", "torch"}
    assert with_both.total_bytes == psutil.virtual_memory().total
    python = choose(EngineName.PYTHON).capabilities()
    assert (python.engines, python.operators) == (("python",), ())
    assert python.executorch == version("executorch")
    native = choose(EngineName.NATIVE).capabilities()
    assert (native.engines, native.backends) == (("native",), ("xnnpack", "portable"))
    assert RunnerLocation.within(home.path).find() is None


def test_a_runner_that_could_not_be_built_is_not_told_of(choose, home):
    place = RunnerLocation.within(home.path)
    place.directory.mkdir(parents=True, exist_ok=True)
    place.remember(place.path.name, "no compiler", None)
    assert choose().capabilities().operators == ()
