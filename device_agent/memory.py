"""This process's memory and the machine's, from the kernel. Knows nothing of what uses it."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package ships no types

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4


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


def spare_bytes() -> int:
    """Memory that the machine could give now without swapping."""
    return int(psutil.virtual_memory().available)


def total_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


def drop_idle_code() -> None:
    """Gives back the pages of libraries' machine code, which is read from its file again where it runs again.

    Importing torch runs some 50 MB of code once, which would else count for the process's whole life. Does nothing
    where the kernel is not Linux.
    """
    try:
        maps = _MAPS.read_text().splitlines()
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps:
        addresses, permissions, *rest = line.split(maxsplit=5)
        # Code is never written, so its pages hold nothing that the file does not.
        if permissions == "r-xp" and rest[-1].endswith(".so"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            madvise(first, last - first, _MADV_DONTNEED)
