"""In-memory storage of a secure aggregation round, for simulations and as the reference for the database's storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shared.federation.secure_aggregation.messages import Advertisement, Phase, Roster
from shared.federation.secure_aggregation.session import MemberRow


@dataclass
class MemorySession:
    """A `SessionRow` in memory."""

    phase: Phase = Phase.KEYS
    closes_at: datetime | None = None
    why: str | None = None
    roster: Roster | None = None


@dataclass
class MemoryMember:
    """A `MemberRow` in memory."""

    member: str
    advertisement: Advertisement
    roster_number: int | None = None
    last_phase: Phase = Phase.KEYS
    sealed: bytes | None = None
    commitment: bytes | None = None
    vector_sha256: str | None = None
    signature: bytes | None = None
    seeds: bytes | None = None
    keys: bytes | None = None


@dataclass
class MemoryStore:
    """A `SecureAggregationStore` in memory."""

    session: MemorySession = field(default_factory=MemorySession)
    members: dict[str, MemoryMember] = field(default_factory=dict)
    stored_vectors: dict[str, bytes] = field(default_factory=dict)

    def row(self, member: str) -> MemoryMember | None:
        """Returns a device's row, or None."""
        return self.members.get(member)

    def rows(self) -> list[MemoryMember]:
        """Returns all rows in the order of their members' names."""
        return [self.members[member] for member in sorted(self.members)]

    def add(self, member: str, advertisement: Advertisement) -> MemoryMember:
        """Adds and returns a row for a device."""
        return self.members.setdefault(member, MemoryMember(member, advertisement))

    def sealed_shares_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Returns each sender's sealed share for `number`, `size` bytes each."""
        shares = {row.roster_number: row.sealed or b"" for row in self.members.values()}
        return [shares[sender][(number - 1) * size : number * size] for sender in senders]

    def store_vector(self, row: MemberRow, sha256: str, data: bytes | memoryview) -> None:
        """Stores a masked vector and records its sha256 in the row."""
        row.vector_sha256 = sha256
        self.stored_vectors[row.vector_sha256] = bytes(data)

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """Yields the masked vectors of these rows one at a time."""
        return (self.stored_vectors[row.vector_sha256 or ""] for row in rows)

    def delete_secrets(self) -> None:
        """Deletes all stored shares and masked vectors."""
        self.stored_vectors.clear()
        for row in self.members.values():
            row.sealed = row.seeds = row.keys = None
