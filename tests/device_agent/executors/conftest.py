"""The two executors of this machine."""

import pytest

from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher


@pytest.fixture(params=["native", "python"])
def launcher(request):
    if request.param == "python":
        return PythonLauncher()
    return RunnerLauncher(request.getfixturevalue("runner_directory"))
