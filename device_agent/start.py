"""The adapter that a run goes on from: whether it is the job's own, and its file in the run's directory.

Knows no training.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.client import DeviceClient
from device_agent.journal import RunDirectory
from shared.canonical import file_sha256
from shared.errors import StartDeleted, Untrusted
from shared.program import ProgramManifest
from shared.protocol import Lease
from shared.registry import AdapterManifest
from shared.signing import choose_key, verify_adapter
from shared.transport import ByteProgress


def admit_start(lease: Lease, program: ProgramManifest, keys: Sequence[Ed25519PublicKey]) -> AdapterManifest | None:
    """The manifest of the version that a lease's job goes on from; None for a job that begins from B = 0.

    keys: the server's, and those that handed over to it. Raises StartDeleted, or Untrusted for any other version than
    the job's, and for one whose B is not of the program's base, A and D.
    """
    asked = lease.job.request.start
    if asked is None and lease.start is None:
        return None
    if lease.start is None:
        raise StartDeleted
    start = verify_adapter(lease.start, choose_key(lease.start.key_id, keys))
    if asked is None or (start.adapter, start.revision) != (asked.adapter, asked.revision):
        raise Untrusted("the adapter that came with the job is not the one that the job goes on from")
    check_fit(start, program)
    return start


def check_fit(adapter: AdapterManifest, program: ProgramManifest) -> None:
    """Raises Untrusted unless a program can take an adapter version's B."""
    for what, has, takes in (
        ("base model", adapter.base.sha256, program.recipe.base.sha256),
        ("frozen A", adapter.a_sha256, program.a_sha256),
        ("D", adapter.size_d, program.size),
    ):
        if has != takes:
            raise Untrusted(f"adapter {adapter.adapter!r} is of {what} {has}, the program that came with it of {takes}")


def holds_start(run: RunDirectory, start: AdapterManifest) -> bool:
    """Whether a run's directory has its start, whole."""
    return run.start.is_file() and file_sha256(run.start) == start.sha256


def fetch_start(
    client: DeviceClient, lease_id: str, run: RunDirectory, start: AdapterManifest, progress: ByteProgress | None
) -> None:
    """Downloads a run's start into its directory, going on with what a kill left of it.

    Raises Untrusted if the server does not send that file, StartDeleted, Gone, or Unavailable.
    """
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    client.download_start(lease_id, start, run.start, progress)
