"""Whether a job's program may run here: signed by this device's server, of the job's recipe, not an old one, and no
larger than the memory. Knows no HTTP and no run.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from device_agent.errors import TooLittleMemory
from device_agent.seen import SeenVersions
from shared.errors import Untrusted
from shared.program import ProgramManifest
from shared.protocol import Lease
from shared.rules import Rules
from shared.signing import verify_manifest


def admit(lease: Lease, key: Ed25519PublicKey, seen: SeenVersions) -> ProgramManifest:
    """The manifest of the lease's program, noted as seen. Raises Untrusted for any other than the job's."""
    manifest = verify_manifest(lease.manifest, key)
    if manifest.recipe != lease.job.recipe:
        raise Untrusted(
            "the program that came with the job is not of the job's recipe; look at what the server has for it"
        )
    privacy = lease.job.request.privacy
    if (privacy is not None) != (manifest.recipe.privacy == "clipped"):
        raise Untrusted("the job asks for privacy that its program does not keep, or has a program that asks for more")
    if privacy is not None and privacy.noise_multiplier is None:
        raise Untrusted("the job does not say how much noise keeps its data private")
    seen.admit(manifest)
    return manifest


def needed_bytes(manifest: ProgramManifest) -> int:
    """What training takes: the weights and the memory that the runtime plans."""
    return manifest.file("weights").size + manifest.planned_bytes


def check_memory(manifest: ProgramManifest, spare: int, rules: Rules) -> None:
    """Raises TooLittleMemory unless training fits the bytes that it can have under the rules."""
    needed = needed_bytes(manifest)
    if needed > spare:
        raise TooLittleMemory(needed, spare, rules.memory_floor_bytes or 0)
