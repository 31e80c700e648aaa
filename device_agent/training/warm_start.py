"""Warm starts: downloads the adapter version that a run begins with."""

from __future__ import annotations

from device_agent.protocol.client import DeviceClient
from device_agent.training.journal import RunDirectory
from shared.canonical import file_sha256
from shared.registry import AdapterManifest
from shared.transport import ByteProgress


def holds_start(run: RunDirectory, start: AdapterManifest) -> bool:
    """Returns whether the run's directory contains the complete start file."""
    return run.start.is_file() and file_sha256(run.start) == start.sha256


def fetch_start(
    client: DeviceClient, lease_id: str, run: RunDirectory, start: AdapterManifest, progress: ByteProgress | None
) -> None:
    """Downloads a run's start file, resuming a partial download.

    Raises Untrusted if its hash differs, StartDeleted, Gone, or Unavailable.
    """
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    client.download_start(lease_id, start, run.start, progress)
