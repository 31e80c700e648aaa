"""Memory usage of the server's processes."""

from __future__ import annotations

import resource
from datetime import datetime

from sqlalchemy.orm import Session

from server.tasks.repository import TaskRepository
from shared.protocol import ServerUsage

KIBIBYTE = 1024


def own_peak_rss() -> int:
    """Returns the peak resident memory of this process, bytes (Linux reports kibibytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def server_usage(session: Session, since: datetime) -> ServerUsage:
    """Returns the peak memory of the server's processes, including workers with a heartbeat after `since`."""
    _, worker, compiler = TaskRepository(session).peaks(since)
    server_peak = own_peak_rss()
    return ServerUsage(
        peak_rss_bytes=max(server_peak, worker, compiler),
        server_peak_rss_bytes=server_peak,
        worker_peak_rss_bytes=worker,
        compiler_peak_rss_bytes=compiler,
    )
