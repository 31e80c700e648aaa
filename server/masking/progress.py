"""How a cohort's masked round goes on, and what it comes to: the side that rounds and their worker see.

Knows no leases and no HTTP.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.artifacts.store import ArtifactStore
from server.clock import utc_now
from server.cohorts.models import CohortRound
from server.db.database import Database
from server.masking.models import MaskedRound
from server.masking.repository import DatabaseStore, MaskingRepository
from shared.errors import MaskingOut
from shared.masking.fixed_point import Total
from shared.masking.messages import Phase
from shared.masking.server import unmasked
from shared.masking.session import MaskingSession


class MaskingProgress:
    """Masked rounds in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session, self._repository = session, MaskingRepository(session)

    def tick(self, masked: MaskedRound) -> Phase:
        """Ends a phase of a masked round, which is locked, if its time has come; the one it is in by then."""
        self._session.flush()
        gone = self._repository.gone(masked.round_number)
        coming = self._repository.coming(masked.round_number)
        return self._masking(masked).tick(coming, masked.least, gone)

    def advance(self, found: CohortRound) -> MaskedRound | None:
        """The masked round of a cohort's round, locked, after `tick`. None: no device has spoken yet."""
        masked = self._repository.locked(found.number)
        if masked is not None:
            self.tick(masked)
        return masked

    def summed(self, masked: MaskedRound) -> dict[int, str]:
        """sha256 of each masked vector in the sum, by the number of the job that it comes from."""
        there = {row.member for row in self._masking(masked).in_sum()}
        members = self._repository.members(masked.round_number)
        return {row.job_number: row.vector_sha256 or "" for row in members if row.member in there}

    def is_summed(self, found: CohortRound, device_id: str) -> bool:
        """Whether a device's vector is in the sum of a round all of whose phases are over."""
        masked = self._repository.get(found.number)
        if masked is None or masked.phase not in (Phase.SUMMING, Phase.DONE):
            return False
        return device_id in {row.member for row in self._masking(masked).in_sum()}

    def finish(self, found: CohortRound, why: str | None = None) -> None:
        """Forgets shares and vectors of a round that has ended. why: it was abandoned, unless its phases were over."""
        masked = self._repository.locked(found.number)
        if masked is not None and masked.phase not in (Phase.DONE, Phase.FAILED):
            self._masking(masked).finish(why)

    def _masking(self, masked: MaskedRound) -> MaskingSession:
        return MaskingSession(DatabaseStore(self._session, masked), masked.parameters, masked.phase_seconds, utc_now())


def round_total(database: Database, artifacts: ArtifactStore, round_id: str) -> Total:
    """The decoded sum of a cohort's round in phase SUMMING, in memory of O(D); computed outside of transactions.

    Raises Untrusted or InvalidUpload if devices' shares or vectors do not fit together.
    """
    with database.reading() as session:
        masked = MaskingRepository(session).of_round(round_id)
        if masked is None:
            raise MaskingOut("nobody took part in the masked round")
        masking = MaskingSession(DatabaseStore(session, masked), masked.parameters, masked.phase_seconds, utc_now())
        gathered, vectors = masking.gathered(), [row.vector_sha256 or "" for row in masking.in_sum()]
    return unmasked(gathered, (artifacts.read(sha256) for sha256 in vectors))
