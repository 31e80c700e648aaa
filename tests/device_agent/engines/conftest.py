"""A phone, for the engine that trains on one."""

from tests.device_agent.adb.conftest import adb, machine, phone

__all__ = ["adb", "machine", "phone"]
