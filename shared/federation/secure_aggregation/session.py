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
    consented,
)
from shared.federation.secure_aggregation.primitives import check_signature
from shared.federation.secure_aggregation.server import (
    Gathered,
    check_advertisement,
    check_shares,
    check_unmasking,
    unmasked,
    vector_of,
)
from shared.federation.secure_aggregation.settings import SecureAggregationParameters

ORDER = (Phase.KEYS, Phase.SHARES, Phase.VECTORS, Phase.CONSENTS, Phase.UNMASKING, Phase.SUMMING)
OUT = "the others of the round went on without this device"


class MemberRow(Protocol):
    """The stored state of one device. place: its number on the roster. reached: the last phase that it answered."""

    member: str
    place: int | None
    reached: Phase
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

    def sealed_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Returns each sender's sealed share for `number`, `size` bytes each."""

    def keep_vector(self, row: MemberRow, data: bytes) -> None:
        """Stores a masked vector and records its sha256 in the row."""

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """Yields the masked vectors of these rows one at a time."""

    def forget(self) -> None:
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
        self._lasts, self._now = timedelta(seconds=phase_seconds), now

    def view(self, member: str, known: Phase | None = None) -> SecureAggregationView:
        """Returns the round's state for a device. The phase's inputs are included only if `known` is another phase."""
        phase, row = self._session.phase, self._store.row(member)
        answered = row is not None and _at(row.reached) >= _at(phase)
        # A device that sent a vector is in the sum, even if it dropped out later.
        bar = Phase.VECTORS if phase.over else phase
        behind = phase is not Phase.KEYS if row is None else _at(row.reached) < _at(bar) - (not phase.over)
        out = behind and phase is not Phase.FAILED
        why = self._session.why or (OUT if out else None)
        view = SecureAggregationView(
            phase=phase,
            closes_at=self._session.closes_at,
            number=None if row is None else row.place,
            waits=answered or out or phase.over,
            why=why,
        )
        if row is None or row.place is None or view.waits or phase is known:
            return view
        return view.model_copy(update=self._given(row.place))

    def _given(self, number: int) -> dict[str, object]:
        if self._session.phase is Phase.SHARES:
            return {"roster": self._session.roster}
        if self._session.phase is Phase.VECTORS:
            return {"delivery": self._delivery(number)}
        if self._session.phase is Phase.CONSENTS:
            return {"survivors": self._reached(Phase.VECTORS)}
        if self._session.phase is Phase.UNMASKING:
            rows = [row for row in self._store.rows() if _at(row.reached) >= _at(Phase.CONSENTS)]
            numbers = tuple(row.place for row in rows if row.place is not None)
            return {"consents": Consents(numbers=numbers, signatures=b"".join(row.signature or b"" for row in rows))}
        return {}

    def _delivery(self, number: int) -> Delivery:
        shared = self._reached(Phase.SHARES)
        return Delivery(shared=shared, sealed=b"".join(self._store.sealed_for(number, shared, SEALED_BYTES)))

    def advertise(self, member: str, identity: bytes, advertisement: Advertisement) -> None:
        """Phase 0. identity: the Ed25519 key that the device enrolled with.

        A device that lost its state may replace its keys until they are published in the roster.
        Raises Untrusted, or LeftOutOfRound when it is too late or the round is full.
        """
        row = self._store.row(member)
        if row is not None and row.advertisement == advertisement:
            return
        self._expect(Phase.KEYS, row)
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
        self._expect(Phase.SHARES, row)
        check_shares(shares, len(self._roster().members))
        row.sealed, row.commitment = shares.sealed, shares.commitment
        row.reached = Phase.SHARES

    def check_vector(self, member: str, sha256: str) -> bool:
        """Whether a masked vector must still be sent; False if this one was accepted. Raises LeftOutOfRound."""
        row = self._row(member)
        if row.vector_sha256 == sha256:
            return False
        self._expect(Phase.VECTORS, row)
        return True

    def masked(self, member: str, sha256: str, data: bytes) -> None:
        """Phase 2. Raises InvalidUpload, or LeftOutOfRound if it is too late."""
        if self.check_vector(member, sha256):
            vector_of(data, self._parameters)
            row = self._row(member)
            self._store.keep_vector(row, data)
            row.reached = Phase.VECTORS

    def consent(self, member: str, consent: Consent) -> None:
        """Phase 3. Raises Untrusted for a signature over anything else, or LeftOutOfRound if it is too late."""
        row = self._row(member)
        if row.signature == consent.signature:
            return
        self._expect(Phase.CONSENTS, row)
        message = consented(self._roster().transcript(self._parameters.context), self._reached(Phase.VECTORS))
        check_signature(row.advertisement.identity, consent.signature, message, member)
        row.signature = consent.signature
        row.reached = Phase.CONSENTS

    def unmask(self, member: str, unmasking: Unmasking) -> None:
        """Phase 4. Raises InvalidUpload, or LeftOutOfRound if it is too late."""
        row = self._row(member)
        if (row.seeds, row.keys) == (unmasking.seeds, unmasking.keys):
            return
        self._expect(Phase.UNMASKING, row)
        survivors, shared = self._reached(Phase.VECTORS), self._reached(Phase.SHARES)
        check_unmasking(unmasking, len(survivors), len(shared) - len(survivors))
        row.seeds, row.keys = unmasking.seeds, unmasking.keys
        row.reached = Phase.UNMASKING

    def tick(self, coming: bool, least: int = 0, gone: Collection[str] = ()) -> Phase:
        """Ends the phase if it is complete or its deadline has passed. Returns the current phase.

        coming: whether devices may still advertise keys. least: minimum number of devices at the start, if more than k.
        gone: devices that will not answer any more.
        """
        phase = self._session.phase
        if phase.over:
            return phase
        rows = self._store.rows()
        late = self._session.closes_at is not None and self._now >= self._session.closes_at
        if phase is Phase.KEYS:
            if late or not coming:
                self._begin(rows, max(least, self._parameters.minimum))
            return self._session.phase
        waited_for = [row for row in rows if _at(row.reached) == _at(phase) - 1 and row.member not in gone]
        if late or not waited_for:
            there = len([row for row in rows if _at(row.reached) >= _at(phase)])
            needed = self._parameters.needed(len(rows))
            if there < needed:
                self._fail(f"{there} of {len(rows)} devices remained in phase {phase}; {needed} are required")
            else:
                self._enter(ORDER[_at(phase) + 1])
        return self._session.phase

    def in_sum(self) -> list[MemberRow]:
        """Returns the devices whose masked vectors were received."""
        return [row for row in self._store.rows() if _at(row.reached) >= _at(Phase.VECTORS)]

    def gathered(self) -> Gathered:
        """Returns the inputs of `unmasked` except for the vectors. Raises LeftOutOfRound before SUMMING."""
        if self._session.phase is not Phase.SUMMING:
            raise LeftOutOfRound(f"the masked round is in phase {self._session.phase}; it is not ready to be summed")
        rows = [(row, row.place) for row in self._store.rows() if row.place is not None]
        return Gathered(
            parameters=self._parameters,
            roster=self._roster(),
            shared=self._reached(Phase.SHARES),
            survivors=self._reached(Phase.VECTORS),
            commitments={number: row.commitment for row, number in rows if row.commitment is not None},
            unmaskings={
                number: Unmasking(seeds=row.seeds or b"", keys=row.keys or b"")
                for row, number in rows
                if row.reached is Phase.UNMASKING
            },
        )

    def total(self) -> Total:
        """Returns the decoded sum. Raises LeftOutOfRound before SUMMING, and the errors of `unmasked`."""
        return unmasked(self.gathered(), self._store.vectors(self.in_sum()))

    def finish(self, why: str | None = None) -> None:
        """Ends the round after SUMMING, as done or, with a reason, as failed. Deletes shares and masked vectors."""
        if why is None:
            self._session.phase, self._session.closes_at = Phase.DONE, None
            self._store.forget()
        else:
            self._fail(why)

    def _begin(self, rows: Sequence[MemberRow], least: int) -> None:
        if len(rows) < least:
            self._fail(f"{len(rows)} devices had their updates ready in time; the round requires {least}")
            return
        for number, row in enumerate(rows, 1):
            row.place = number
        self._session.roster = Roster(members=tuple(row.advertisement for row in rows))
        self._enter(Phase.SHARES)

    def _enter(self, phase: Phase) -> None:
        self._session.phase = phase
        self._session.closes_at = None if phase.over else self._now + self._lasts

    def _fail(self, why: str) -> None:
        self._session.phase, self._session.closes_at, self._session.why = Phase.FAILED, None, why
        self._store.forget()

    def _expect(self, phase: Phase, row: MemberRow | None) -> None:
        """Raises LeftOutOfRound unless the round is in this phase and the device answered the one before."""
        if self._session.phase is not phase or (
            row is not None and _at(row.reached) not in (_at(phase) - 1, _at(phase))
        ):
            raise LeftOutOfRound(
                f"the masked round is in phase {self._session.phase} and does not accept {phase} from this device"
            )
        if row is not None and phase is not Phase.KEYS and row.reached is phase:
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

    def _reached(self, phase: Phase) -> tuple[int, ...]:
        return tuple(
            row.place for row in self._store.rows() if row.place is not None and _at(row.reached) >= _at(phase)
        )


def _at(phase: Phase) -> int:
    return ORDER.index(phase) if phase in ORDER else len(ORDER)
