"""A phone, for the runtime that runs on one."""

from tests.device_agent.adb.conftest import adb, machine, phone

__all__ = ["adb", "machine", "phone"]
