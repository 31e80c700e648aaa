"""Where a worker runs: the machine whose memory it shares, and whether another's process is alive. Linux and others."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package ships no types

from server.settings import Settings

_LATER = timedelta(seconds=5)  # a process that began so much after a worker is another that has its number


def host_name(settings: Settings) -> str:
    """The machine's name, as the settings or the system say."""
    return settings.worker_host or socket.gethostname()


def pid_space() -> str:
    """Names where this process's numbers mean the same processes: one boot and one namespace; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_dead(pid: int, since: datetime) -> bool:
    """Whether the process that had this number at a time is gone."""
    try:
        process = psutil.Process(pid)
        began = datetime.fromtimestamp(process.create_time(), since.tzinfo)
        return bool(process.status() == psutil.STATUS_ZOMBIE or began > since + _LATER)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
