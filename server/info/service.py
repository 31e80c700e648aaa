"""What the server says of itself. Knows no HTTP."""

from __future__ import annotations

import resource
from datetime import datetime
from importlib.metadata import version

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.orm import Session

from server.programs.repository import WorkerRepository
from shared.protocol import ServerInfo, ServerUsage
from shared.signing import key_id, public_text

KIBIBYTE = 1024


def server_info(key: Ed25519PublicKey) -> ServerInfo:
    """Version, and the key that devices pin."""
    return ServerInfo(version=version("mobizo"), public_key=public_text(key), key_id=key_id(key))


def own_peak_rss() -> int:
    """Peak resident memory of this process, bytes (Linux counts kibibytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def server_usage(session: Session, since: datetime) -> ServerUsage:
    """Peak memory of the server's processes; workers count if they were heard from after `since`."""
    worker, compiler = WorkerRepository(session).peaks(since)
    own = own_peak_rss()
    return ServerUsage(
        peak_rss_bytes=max(own, worker, compiler),
        server_peak_rss_bytes=own,
        worker_peak_rss_bytes=worker,
        compiler_peak_rss_bytes=compiler,
    )
