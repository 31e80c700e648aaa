"""The engines of this machine, and a phone for the engine that trains on one."""

import pytest

from device_agent.engines.child_process import NativeEngine, PythonEngine
from tests.device_agent.android.conftest import adb, machine, phone

__all__ = ["adb", "machine", "phone"]


@pytest.fixture
def native(runner_directory):
    """The native runner, which starts in a moment; loading torch takes the Python engine seconds."""
    return NativeEngine(runner_directory)


@pytest.fixture(params=["native", pytest.param("python", marks=pytest.mark.slow)])
def engine(request):
    """Both engines, for what each has code of its own for."""
    return request.getfixturevalue("native") if request.param == "native" else PythonEngine()
