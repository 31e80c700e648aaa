"""A masked round whose rows are in memory: for simulations, and the model that a database's rows are held against.

Knows no phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from shared.canonical import sha256_hex
from shared.masking.messages import Advertisement, Phase, Roster
from shared.masking.session import MemberRow


@dataclass
class MemorySession:
    """A `SessionRow`."""

    phase: Phase = Phase.KEYS
    closes_at: datetime | None = None
    why: str | None = None
    roster: Roster | None = None


@dataclass
class MemoryMember:
    """A `MemberRow`."""

    member: str
    advertisement: Advertisement
    place: int | None = None
    reached: Phase = Phase.KEYS
    sealed: bytes | None = None
    commitment: bytes | None = None
    vector_sha256: str | None = None
    signature: bytes | None = None
    seeds: bytes | None = None
    keys: bytes | None = None


@dataclass
class MemoryStore:
    """A `MaskingStore`."""

    session: MemorySession = field(default_factory=MemorySession)
    members: dict[str, MemoryMember] = field(default_factory=dict)
    kept: dict[str, bytes] = field(default_factory=dict)

    def row(self, member: str) -> MemoryMember | None:
        """A device's."""
        return self.members.get(member)

    def rows(self) -> list[MemoryMember]:
        """All, in the order of their members' names."""
        return [self.members[member] for member in sorted(self.members)]

    def add(self, member: str, advertisement: Advertisement) -> MemoryMember:
        """A row for a device that has none."""
        return self.members.setdefault(member, MemoryMember(member, advertisement))

    def sealed_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Of each sender's sealed shares the one for `number`, `size` bytes each."""
        sealed = {row.place: row.sealed or b"" for row in self.members.values()}
        return [sealed[sender][(number - 1) * size : number * size] for sender in senders]

    def keep_vector(self, row: MemberRow, data: bytes) -> None:
        """Keeps a masked vector and notes its sha256 in the row."""
        row.vector_sha256 = sha256_hex(data)
        self.kept[row.vector_sha256] = data

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """The masked vectors of these rows, one at a time."""
        return (self.kept[row.vector_sha256 or ""] for row in rows)

    def forget(self) -> None:
        """Removes every share and masked vector that is kept."""
        self.kept.clear()
        for row in self.members.values():
            row.sealed = row.seeds = row.keys = None
