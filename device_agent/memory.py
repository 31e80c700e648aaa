"""Memory use of this process and of the machine, in bytes."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_MADV_DONTNEED = 4
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 128 << 10


def peak_rss_bytes() -> int:
    """Returns the peak resident memory of this process.

    Reads VmHWM if available, because on Linux a process inherits getrusage's ru_maxrss from its parent through exec.
    """
    status = _STATUS.read_text() if _STATUS.exists() else ""
    peak = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else int(peak[1])) * 1024


def rss_bytes() -> int:
    """Returns the current resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def spare_bytes() -> int:
    """Returns the memory that the machine can allocate without swapping."""
    return int(psutil.virtual_memory().available)


def release_code_pages() -> None:
    """Releases the resident pages of shared libraries' code; the kernel reloads them from file when needed.

    Importing torch touches about 50 MB of code that is not used again. Does nothing on other systems than Linux.
    """
    try:
        maps = _MAPS.read_text().splitlines()
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps:
        addresses, permissions, *fields = line.split(maxsplit=5)
        # Code pages are read-only, so the file holds the same bytes.
        if permissions == "r-xp" and ".so" in Path(fields[-1]).suffixes:  # "libcrypto.so.3" too
            first, last = (int(address, 16) for address in addresses.split("-"))
            madvise(first, last - first, _MADV_DONTNEED)


def trim_heap() -> None:
    """Returns freed memory of the C library's heap to the system, if it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """Makes the C library, if it is glibc, map each block of 128 KiB or more by itself, so that a freed one returns to
    the system at once. By default it raises that size to the largest block freed so far, and keeps freed arrays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
