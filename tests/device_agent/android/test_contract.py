"""The contract of executors, on a phone."""

import pytest

from tests.device_agent.executors.test_contract import *  # noqa: F403

del launcher  # noqa: F821  # this folder's conftest has the phone's


@pytest.fixture
def pair():
    return "adb", "rademacher"
