"""A phone, an adb that reaches it, and a launcher of executors on it."""

import pytest

from device_agent.android.adb import Adb
from device_agent.executors.phone import PhoneLauncher
from tests.device_agent.android.packages import Missing
from tests.device_agent.android.phone import Phone
from tests.device_agent.tiny import write_dataset


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The phone itself; skips where this machine cannot give one."""
    try:
        phone = Phone(tmp_path_factory.mktemp("phone"))
    except Missing as error:
        pytest.skip(f"no phone: {error}")
    yield phone
    phone.close()


@pytest.fixture
def phone(machine):
    """The phone, with one adbd that is connected and nothing running from before."""
    machine.begin()
    yield machine
    machine.end()


@pytest.fixture
def adb(phone):
    return Adb(phone.serial, phone.adb)


@pytest.fixture
def launcher(adb, runner_directory):
    return PhoneLauncher(adb, runner_directory)


@pytest.fixture(scope="session")
def movies(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "movies")
