"""The phases of one secure aggregation round at the server, with deadlines, over a storage protocol.

    KEYS -> SHARES -> VECTORS -> CONSENTS -> UNMASKING -> SUMMING -> DONE
      any of the first five -> FAILED, with fewer than k devices or than t of those on the roster

A phase ends when every expected device has answered, or at its deadline; devices that have not answered by then are
excluded. A repeated message has no effect. The database and `shared.federation.secure_aggregation.memory` implement
`MemberRow` and `SessionRow`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from shared.errors import InvalidUpload, LeftOutOfRound
from shared.federation.secure_aggregation.fixed_point import Total
from shared.federation.secure_aggregation.messages import (
    SEALED_BYTES,
    Advertisement,
    Consent,
    Consents,
    Delivery,
    Phase,
    Roster,
    SealedShares,
    SecureAggregationView,
    Unmasking,
    consent_bytes,
)
from shared.federation.secure_aggregation.primitives import check_signature
from shared.federation.secure_aggregation.server import (
    UnmaskingInputs,
    check_advertisement,
    check_shares,
    check_unmasking,
    parse_vector,
    unmask_sum,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters

PHASE_ORDER = (Phase.KEYS, Phase.SHARES, Phase.VECTORS, Phase.CONSENTS, Phase.UNMASKING, Phase.SUMMING)
EXCLUDED = "the others of the round went on without this device"


class MemberRow(Protocol):
    """The stored state of one device. last_phase: the last phase that it answered."""

    member: str
    roster_number: int | None
    last_phase: Phase
    advertisement: Advertisement
    sealed: bytes | None
    commitment: bytes | None
    vector_sha256: str | None
    signature: bytes | None
    seeds: bytes | None
    keys: bytes | None


class SessionRow(Protocol):
    """The stored state of the round. closes_at: end of the phase. why: reason for a failure."""

    phase: Phase
    closes_at: datetime | None
    why: str | None
    roster: Roster | None


class SecureAggregationStore(Protocol):
    """Storage of the rows of one round. At most one caller changes them at a time."""

    @property
    def session(self) -> SessionRow:
        """The round's row."""

    def row(self, member: str) -> MemberRow | None:
        """Returns a device's row, or None."""

    def rows(self) -> Sequence[MemberRow]:
        """Returns all rows in the order of their members' names."""

    def add(self, member: str, advertisement: Advertisement) -> MemberRow:
        """Adds and returns a row for a device."""

    def sealed_shares_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Returns each sender's sealed share for `number`, `size` bytes each."""

    def store_vector(self, row: MemberRow, sha256: str, data: bytes | memoryview) -> None:
        """Stores a masked vector and records its sha256 in the row."""

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """Yields the masked vectors of these rows one at a time."""

    def delete_secrets(self) -> None:
        """Deletes all stored shares and masked vectors."""


class SecureAggregationSession:
    """One secure aggregation round at the server."""

    def __init__(
        self,
        store: SecureAggregationStore,
        parameters: SecureAggregationParameters,
        phase_seconds: float,
        now: datetime,
    ) -> None:
        """phase_seconds: duration of every phase except the first, whose end the caller sets. now: the current time."""
        self._store, self._session, self._parameters = store, store.session, parameters
        self._phase_duration, self._now = timedelta(seconds=phase_seconds), now

    def view(self, member: str, known_phase: Phase | None = None) -> SecureAggregationView:
        """Returns the round's state for a device.

        The phase's inputs are included unless `known_phase` is this phase.
        """
        phase, row = self._session.phase, self._store.row(member)
        has_answered = row is not None and _phase_index(row.last_phase) >= _phase_index(phase)
        # A device that sent a vector is in the sum, even if it dropped out later.
        required_phase = Phase.VECTORS if phase.over else phase
        behind = (
            phase is not Phase.KEYS
            if row is None
            else _phase_index(row.last_phase) < _phase_index(required_phase) - (not phase.over)
        )
        excluded = behind and phase is not Phase.FAILED
        why = self._session.why or (EXCLUDED if excluded else None)
        view = SecureAggregationView(
            phase=phase,
            closes_at=self._session.closes_at,
            number=None if row is None else row.roster_number,
            waits=has_answered or excluded or phase.over,
            why=why,
        )
        if row is None or row.roster_number is None or view.waits or phase is known_phase:
            return view
        return view.model_copy(update=self._phase_inputs(row.roster_number))

    def _phase_inputs(self, number: int) -> dict[str, object]:
        if self._session.phase is Phase.SHARES:
            return {"roster": self._session.roster}
        if self._session.phase is Phase.VECTORS:
            return {"delivery": self._delivery(number)}
        if self._session.phase is Phase.CONSENTS:
            return {"survivors": self._numbers_that_reached(Phase.VECTORS)}
        if self._session.phase is Phase.UNMASKING:
            rows = [row for row in self._store.rows() if _phase_index(row.last_phase) >= _phase_index(Phase.CONSENTS)]
            numbers = tuple(row.roster_number for row in rows if row.roster_number is not None)
            return {"consents": Consents(numbers=numbers, signatures=b"".join(row.signature or b"" for row in rows))}
        return {}

    def _delivery(self, number: int) -> Delivery:
        shared = self._numbers_that_reached(Phase.SHARES)
        return Delivery(shared=shared, sealed=b"".join(self._store.sealed_shares_for(number, shared, SEALED_BYTES)))

    def advertise(self, member: str, identity: bytes, advertisement: Advertisement) -> None:
        """Phase 0. identity: the Ed25519 key that the device enrolled with.

        A device that lost its state may replace its keys until they are published in the roster.
        Raises Untrusted, or LeftOutOfRound when it is too late or the round is full.
        """
        row = self._store.row(member)
        if row is not None and row.advertisement == advertisement:
            return
        self._check_phase(Phase.KEYS, row)
        check_advertisement(advertisement, member, identity, self._parameters.context)
        if row is not None:
            row.advertisement = advertisement
        elif len(self._store.rows()) >= self._parameters.most_members:
            raise LeftOutOfRound(f"the round already has its maximum of {self._parameters.most_members} devices")
        else:
            self._store.add(member, advertisement)

    def share(self, member: str, shares: SealedShares) -> None:
        """Phase 1. Raises InvalidUpload, or LeftOutOfRound if it is too late."""
        row = self._row(member)
        if (row.sealed, row.commitment) == (shares.sealed, shares.commitment):
            return
        self._check_phase(Phase.SHARES, row)
        check_shares(shares, len(self._roster().members))
        row.sealed, row.commitment = shares.sealed, shares.commitment
        row.last_phase = Phase.SHARES

    def check_vector(self, member: str, sha256: str) -> bool:
        """Whether a masked vector must still be sent; False if this one was accepted. Raises LeftOutOfRound."""
        row = self._row(member)
        if row.vector_sha256 == sha256:
            return False
        self._check_phase(Phase.VECTORS, row)
        return True

    def submit_vector(self, member: str, sha256: str, data: bytes | memoryview) -> None:
        """Phase 2. Raises InvalidUpload, or LeftOutOfRound if it is too late."""
        if self.check_vector(member, sha256):
            parse_vector(data, self._parameters)
            row = self._row(member)
            self._store.store_vector(row, sha256, data)
            row.last_phase = Phase.VECTORS

    def consent(self, member: str, consent: Consent) -> None:
        """Phase 3. Raises Untrusted for a signature over anything else, or LeftOutOfRound if it is too late."""
        row = self._row(member)
        if row.signature == consent.signature:
            return
        self._check_phase(Phase.CONSENTS, row)
        message = consent_bytes(
            self._roster().transcript(self._parameters.context), self._numbers_that_reached(Phase.VECTORS)
        )
        check_signature(row.advertisement.identity, consent.signature, message, member)
        row.signature = consent.signature
        row.last_phase = Phase.CONSENTS

    def unmask(self, member: str, unmasking: Unmasking) -> None:
        """Phase 4. Raises InvalidUpload, or LeftOutOfRound if it is too late."""
        row = self._row(member)
        if (row.seeds, row.keys) == (unmasking.seeds, unmasking.keys):
            return
        self._check_phase(Phase.UNMASKING, row)
        survivors, shared = self._numbers_that_reached(Phase.VECTORS), self._numbers_that_reached(Phase.SHARES)
        check_unmasking(unmasking, len(survivors), len(shared) - len(survivors))
        row.seeds, row.keys = unmasking.seeds, unmasking.keys
        row.last_phase = Phase.UNMASKING

    def tick(self, more_expected: bool, minimum: int = 0, unreachable: Collection[str] = ()) -> Phase:
        """Ends the phase if it is complete or its deadline has passed. Returns the current phase.

        more_expected: whether devices may still advertise keys. minimum: number of devices required at the
        start, if more than k. unreachable: devices that will not answer any more.
        """
        phase = self._session.phase
        if phase.over:
            return phase
        rows = self._store.rows()
        deadline_passed = self._session.closes_at is not None and self._now >= self._session.closes_at
        if phase is Phase.KEYS:
            if deadline_passed or not more_expected:
                self._start_shares(rows, max(minimum, self._parameters.minimum))
            return self._session.phase
        pending = [
            row
            for row in rows
            if _phase_index(row.last_phase) == _phase_index(phase) - 1 and row.member not in unreachable
        ]
        if deadline_passed or not pending:
            answer_count = len([row for row in rows if _phase_index(row.last_phase) >= _phase_index(phase)])
            required = self._parameters.required_devices(len(rows))
            if answer_count < required:
                self._fail(f"{answer_count} of {len(rows)} devices remained in phase {phase}; {required} are required")
            else:
                self._enter(PHASE_ORDER[_phase_index(phase) + 1])
        return self._session.phase

    def in_sum(self) -> list[MemberRow]:
        """Returns the devices whose masked vectors were received."""
        return [row for row in self._store.rows() if _phase_index(row.last_phase) >= _phase_index(Phase.VECTORS)]

    def unmasking_inputs(self) -> UnmaskingInputs:
        """Returns the inputs of `unmask_sum` except for the vectors. Raises LeftOutOfRound before SUMMING."""
        if self._session.phase is not Phase.SUMMING:
            raise LeftOutOfRound(f"the masked round is in phase {self._session.phase}; it is not ready to be summed")
        rows = [(row, row.roster_number) for row in self._store.rows() if row.roster_number is not None]
        return UnmaskingInputs(
            parameters=self._parameters,
            roster=self._roster(),
            shared=self._numbers_that_reached(Phase.SHARES),
            survivors=self._numbers_that_reached(Phase.VECTORS),
            commitments={number: row.commitment for row, number in rows if row.commitment is not None},
            unmaskings={
                number: Unmasking(seeds=row.seeds or b"", keys=row.keys or b"")
                for row, number in rows
                if row.last_phase is Phase.UNMASKING
            },
        )

    def total(self) -> Total:
        """Returns the decoded sum. Raises LeftOutOfRound before SUMMING, and the errors of `unmask_sum`."""
        return unmask_sum(self.unmasking_inputs(), self._store.vectors(self.in_sum()))

    def finish(self, why: str | None = None) -> None:
        """Ends the round after SUMMING, as done or, with a reason, as failed. Deletes shares and masked vectors."""
        if why is None:
            self._session.phase, self._session.closes_at = Phase.DONE, None
            self._store.delete_secrets()
        else:
            self._fail(why)

    def _start_shares(self, rows: Sequence[MemberRow], minimum: int) -> None:
        if len(rows) < minimum:
            self._fail(f"{len(rows)} devices had their updates ready in time; the round requires {minimum}")
            return
        for number, row in enumerate(rows, 1):
            row.roster_number = number
        self._session.roster = Roster(members=tuple(row.advertisement for row in rows))
        self._enter(Phase.SHARES)

    def _enter(self, phase: Phase) -> None:
        self._session.phase = phase
        self._session.closes_at = None if phase.over else self._now + self._phase_duration

    def _fail(self, why: str) -> None:
        self._session.phase, self._session.closes_at, self._session.why = Phase.FAILED, None, why
        self._store.delete_secrets()

    def _check_phase(self, phase: Phase, row: MemberRow | None) -> None:
        """Raises LeftOutOfRound unless the round is in this phase and the device answered the one before."""
        if self._session.phase is not phase or (
            row is not None and _phase_index(row.last_phase) not in (_phase_index(phase) - 1, _phase_index(phase))
        ):
            raise LeftOutOfRound(
                f"the masked round is in phase {self._session.phase} and does not accept {phase} from this device"
            )
        if row is not None and phase is not Phase.KEYS and row.last_phase is phase:
            raise LeftOutOfRound(f"this device has already sent a different message in phase {phase}")

    def _row(self, member: str) -> MemberRow:
        row = self._store.row(member)
        if row is None:
            raise LeftOutOfRound(
                "this device did not advertise keys in the first phase, so it is not part of the round"
            )
        return row

    def _roster(self) -> Roster:
        if self._session.roster is None:
            raise InvalidUpload("the masked round has no roster yet")
        return self._session.roster

    def _numbers_that_reached(self, phase: Phase) -> tuple[int, ...]:
        return tuple(
            row.roster_number
            for row in self._store.rows()
            if row.roster_number is not None and _phase_index(row.last_phase) >= _phase_index(phase)
        )


def _phase_index(phase: Phase) -> int:
    return PHASE_ORDER.index(phase) if phase in PHASE_ORDER else len(PHASE_ORDER)
