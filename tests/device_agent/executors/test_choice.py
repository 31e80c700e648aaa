"""Which executor runs a program, and what the agent says when the requested one is unavailable."""

from importlib.metadata import version

import psutil
import pytest

from device_agent.android.adb import Adb
from device_agent.errors import NoRunner
from device_agent.executors.choice import ExecutorName, LauncherSelector, platform_name
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from shared.errors import BadRequest

EXECUTORCH_BACKENDS = ("xnnpack", "portable")


def select(manifest, requested=None):
    return LauncherSelector(requested)(manifest)


def test_the_native_runner_is_used_unless_python_is_requested(runner_directory, rademacher):
    assert isinstance(select(rademacher.manifest), RunnerLauncher)
    assert isinstance(select(rademacher.manifest, ExecutorName.PYTHON), PythonLauncher)


def test_without_a_runner_python_trains_unless_the_runner_is_requested(without_runner, rademacher):
    assert isinstance(select(rademacher.manifest), PythonLauncher)
    with pytest.raises(NoRunner, match="holds no mobizo-runner"):
        select(rademacher.manifest, ExecutorName.NATIVE)
    recipe = rademacher.manifest.recipe.model_copy(update={"noise": "operator"})
    with pytest.raises(NoRunner):  # only the runner has the noise operator
        select(rademacher.manifest.model_copy(update={"recipe": recipe}))


def test_a_device_without_any_runtime_says_so(without_runner, rademacher, monkeypatch):
    monkeypatch.setattr("device_agent.executors.choice.find_spec", lambda _name: None)
    with pytest.raises(NoRunner, match="holds no mobizo-runner"):
        select(rademacher.manifest)


def test_programs_of_torch_run_in_python(runner_directory, rademacher):
    recipe = rademacher.manifest.recipe.model_copy(update={"backend": "torch"})
    manifest = rademacher.manifest.model_copy(update={"recipe": recipe})
    assert isinstance(select(manifest), PythonLauncher)
    for selector in (LauncherSelector(ExecutorName.NATIVE), LauncherSelector(phone=Adb())):
        with pytest.raises(BadRequest, match=r"no backend 'torch'.*--executor python"):
            selector(manifest)


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


def test_capabilities_are_those_of_the_executors_that_are_there(runner_directory, request):
    both = LauncherSelector().capabilities()
    assert both.engines == ("native", "python")
    assert both.operators == ("mobizo::noise",)
    assert set(both.backends) == {*EXECUTORCH_BACKENDS, "torch"}
    assert both.total_bytes == psutil.virtual_memory().total
    native = LauncherSelector(ExecutorName.NATIVE).capabilities()
    assert (native.engines, native.backends) == (("native",), EXECUTORCH_BACKENDS)
    request.getfixturevalue("without_runner")
    for requested in (None, ExecutorName.PYTHON):
        python = LauncherSelector(requested).capabilities()
        assert (python.engines, python.operators) == (("python",), ())
        assert python.executorch == version("executorch")
