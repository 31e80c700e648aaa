"""Runner builds: their table, its SQL, and offering signed builds to devices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, utc_now
from server.storage.store import FileReferences
from shared.catalog import RunnerBuild, SignedRunnerBuild
from shared.errors import NotFound
from shared.signing import sign_runner_build


class StoredRunnerBuild(Numbered, Table):
    """The build that devices of one platform get. Belongs to the server, not to a tenant."""

    __tablename__ = "runners"

    platform: Mapped[str] = mapped_column(String(100), unique=True)
    signed: Mapped[SignedRunnerBuild] = mapped_column(Document(SignedRunnerBuild))
    added_at: Mapped[datetime] = mapped_column(Moment)


def _builds(session: Session) -> list[str]:
    return [runner.signed.build.sha256 for runner in session.scalars(select(StoredRunnerBuild))]


FILES = FileReferences(documents=_builds)


class RunnerBuildRepository:
    """Runner builds in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, runner: StoredRunnerBuild) -> None:
        """Stores the first build of a platform."""
        self._session.add(runner)
        self._session.flush()

    def of_platform(self, platform: str) -> StoredRunnerBuild | None:
        """The build for a platform."""
        return self._session.scalar(select(StoredRunnerBuild).where(StoredRunnerBuild.platform == platform))

    def all(self) -> Sequence[StoredRunnerBuild]:
        """Every build, by platform."""
        return self._session.scalars(select(StoredRunnerBuild).order_by(StoredRunnerBuild.platform)).all()


class RunnerBuildService:
    """Runner builds in one transaction."""

    def __init__(self, session: Session) -> None:
        self._runners = RunnerBuildRepository(session)

    def offer(self, build: RunnerBuild, key: Ed25519PrivateKey) -> SignedRunnerBuild:
        """Signs a build, whose archive is stored, and offers it to the devices of its platform."""
        signed = sign_runner_build(build, key)
        existing = self._runners.of_platform(build.platform)
        if existing is None:
            self._runners.add(StoredRunnerBuild(platform=build.platform, signed=signed, added_at=utc_now()))
        else:
            existing.signed, existing.added_at = signed, utc_now()
        return signed

    def signed(self, platform: str) -> SignedRunnerBuild:
        """Returns the signed build of a platform. Raises NotFound."""
        build = self._runners.of_platform(platform)
        if build is None:
            raise NotFound(
                f"there is no runner for {platform} here; build it on the device, or ask the operator for one "
                "(`mobizo-server runner-build add`)"
            )
        return build.signed

    def check(self, platform: str, sha256: str) -> None:
        """Raises NotFound unless the hash is that of the platform's archive."""
        if self.signed(platform).build.sha256 != sha256:
            raise NotFound(f"the runner for {platform} is another by now; ask for its description again")


def sign_builds(session: Session, key: Ed25519PrivateKey) -> int:
    """Signs every build with `key`, after a rotation of the server's key; returns their number."""
    builds = RunnerBuildRepository(session).all()
    for runner in builds:
        runner.signed = sign_runner_build(runner.signed.build, key)
    return len(builds)
