"""Offering runner builds. Knows no HTTP."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.runners.models import Runner
from server.runners.repository import RunnerRepository
from shared.errors import NotFound
from shared.protocol import RunnerBuild, SignedRunner
from shared.signing import sign_runner


class RunnerService:
    """Runner builds in one transaction."""

    def __init__(self, session: Session) -> None:
        self._runners = RunnerRepository(session)

    def offer(self, build: RunnerBuild, key: Ed25519PrivateKey) -> SignedRunner:
        """Signs a build, whose archive is stored, and gives it to its platform's devices from now on."""
        signed = sign_runner(build, key)
        known = self._runners.of_platform(build.platform)
        if known is None:
            self._runners.add(Runner(platform=build.platform, signed=signed, added_at=utc_now()))
        else:
            known.signed, known.added_at = signed, utc_now()
        return signed

    def signed(self, platform: str) -> SignedRunner:
        """The build for a platform. Raises NotFound."""
        found = self._runners.of_platform(platform)
        if found is None:
            raise NotFound(
                f"there is no runner for {platform} here; build it on the device, or ask the operator for one "
                "(`mobizo-server runners add`)"
            )
        return found.signed

    def check(self, platform: str, sha256: str) -> None:
        """Raises NotFound unless that is the archive of the platform's build."""
        if self.signed(platform).build.sha256 != sha256:
            raise NotFound(f"the runner for {platform} is another by now; ask for its description again")
