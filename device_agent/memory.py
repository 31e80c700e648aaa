"""This process's memory, from the kernel. Knows nothing of what uses it."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(name + ":")), None)
    return None if found is None else int(found.split()[1]) * 1024


def peak_rss_bytes() -> int:
    """The most resident memory this process has had.

    VmHWM rather than getrusage where there is one: Linux hands ru_maxrss down from the parent through exec.
    """
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS") or peak_rss_bytes()
