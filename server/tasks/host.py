"""The machine of a worker: its name, its memory for tasks, and whether other workers on it are alive."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from server.settings import Settings

SHARE = 0.8  # of a machine's memory is for tasks; the rest is for workers, the server and files
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LATER = timedelta(seconds=5)  # a process that began this much later than a worker has only reused its id


def host_name(settings: Settings) -> str:
    """Returns the machine's name from the settings or the system."""
    return settings.worker_host or socket.gethostname()


def pid_space() -> str:
    """Identifies the boot and namespace in which process ids are comparable; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_dead(pid: int, since: datetime) -> bool:
    """Returns whether the process that had this id at a time has ended."""
    try:
        process = psutil.Process(pid)
        began = datetime.fromtimestamp(process.create_time(), since.tzinfo)
        return bool(process.status() == psutil.STATUS_ZOMBIE or began > since + _LATER)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def host_budget(settings: Settings) -> tuple[int, bool]:
    """Returns the memory for all tasks of this machine, bytes, and whether an operator set it."""
    if settings.compile_budget_bytes is not None:
        return settings.compile_budget_bytes, True
    return round(machine_bytes() * SHARE), False


def machine_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """Returns the memory of this machine, or of the container of this process, bytes."""
    total = int(psutil.virtual_memory().total)
    for path in limits:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total
