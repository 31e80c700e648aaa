"""The keys that sign manifests: which one does now, and how one hands over to the next.

The table says which key signs; a host's file holds its private half. A rotation commits the table first, so a host
whose file is not there yet, or is another, signs nothing rather than what devices would refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.database import Database
from server.identity.devices.repository import DeviceRepository
from server.identity.devices.service import DeviceService
from server.identity.signing_keys.files import KeyFiles
from server.identity.signing_keys.models import ServerKey
from server.ports import Port
from server.settings import Settings
from shared.errors import Unavailable
from shared.key_rotation import ServerKeys, SignedKeyRotation, sign_key_rotation
from shared.protocol import ServerInfo
from shared.signing import key_id, parse_public, public_text

# Called in the transaction of a rotation: each signs the documents of one feature with the new key, and returns their
# number.
RESIGNERS: Port[tuple[Callable[[Session, Ed25519PrivateKey], int], ...]] = Port("signing_keys.resigners")
# Called with the id of each device that a rotation revokes, in the same transaction.
REVOKED: Port[tuple[Callable[[Session, Settings, str], None], ...]] = Port("signing_keys.revoked")


@dataclass(frozen=True)
class Rotated:
    """What a rotation did: ids of the key before and after, documents signed anew, devices shut out."""

    before: str
    after: str
    signed: int
    devices: int


class KeyService:
    """The server's keys in one transaction."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._keys = KeyRepository(session)
        self._files = KeyFiles(settings.key_path)

    def public(self) -> Ed25519PublicKey:
        """The key that signs now. Raises Unavailable without one."""
        current = self._keys.current()
        return self._files.load().public_key() if current is None else parse_public(current.public_key)

    def private(self, *, changing: bool = False) -> Ed25519PrivateKey:
        """The key to sign with in this transaction: no rotation comes between.

        Raises Unavailable if this host does not have it.
        """
        current = self._keys.held(changing=changing)
        if current is None:
            return self._files.load()
        self._files.settle(current.key_id)
        key = self._files.load()
        if key_id(key.public_key()) != current.key_id:
            raise Unavailable(
                f"this host has the signing key {key_id(key.public_key())}, but {current.key_id} signs now: copy "
                f"{self._files.path} here from the host where `mobizo-server keys rotate` ran"
            )
        return key

    def chain(self) -> ServerKeys:
        """The key that signs now and the statements that lead to it, since the last break."""
        rotations = []
        for row in reversed(self._keys.all()):
            if row.rotation is None:
                break
            rotations.append(row.rotation)
        public = self.public()
        return ServerKeys(public_key=public_text(public), key_id=key_id(public), rotations=rotations[::-1])

    def note_first(self) -> None:
        """Writes the home's first key down, if none is."""
        if self._keys.current() is None:
            self._add(self._files.load().public_key(), None)

    def rotate(self, following: Ed25519PrivateKey, *, compromised: bool) -> int:
        """Makes a key sign from now on, and signs every program and runner anew; the number of them.

        following: lies beside the one that signs, as the next. compromised: the key before is trusted no more and does
        not hand over, so that devices must enroll again. Raises Unavailable if this host lacks the key before.
        """
        public, statement = following.public_key(), None
        if compromised:
            for former in self._keys.all():
                former.compromised_at = former.compromised_at or utc_now()
            self._keys.held(changing=True)
        else:
            statement = sign_key_rotation(self.private(changing=True), public, utc_now())
        self._add(public, statement)
        return sum(sign_again(self._session, following) for sign_again in RESIGNERS.get())

    def note_retired(self, former: str) -> None:
        """The private half of a former key was destroyed."""
        for row in self._keys.all():
            if row.key_id == former:
                row.retired_at = row.retired_at or utc_now()

    def _add(self, public: Ed25519PublicKey, statement: SignedKeyRotation | None) -> None:
        row = ServerKey(key_id=key_id(public), public_key=public_text(public), rotation=statement, created_at=utc_now())
        self._keys.add(row)


def prepare_keys(database: Database, settings: Settings) -> None:
    """Writes the first key down where none is, and puts one in place that an interrupted rotation left aside.

    Raises Unavailable if the home has no key.
    """
    files = KeyFiles(settings.key_path)
    with database.reading() as session:
        current = KeyRepository(session).current()
        known = None if current is None else current.key_id
    if known is not None:
        files.settle(known)
        return
    files.load()
    # Another process may write it down at this moment: one of them does.
    with suppress(IntegrityError), database.writing() as session:
        KeyService(session, settings).note_first()


def rotate_key(database: Database, settings: Settings, *, compromised: bool) -> Rotated:
    """A new key that signs from now on. Killed at any moment, it was done or it was not.

    compromised: every device is shut out besides, since it must enroll again. Raises Unavailable.
    """
    # First, since a rotation that was killed may have left the only copy of the key that signs as the next.
    prepare_keys(database, settings)
    files = KeyFiles(settings.key_path)
    before = key_id(files.load().public_key())
    following = files.prepare()
    with database.writing() as session:
        signed = KeyService(session, settings).rotate(following, compromised=compromised)
        devices = shut_out(session, settings) if compromised else 0
    files.settle(key_id(following.public_key()))
    if compromised:
        files.destroy(before)
    return Rotated(before, key_id(following.public_key()), signed, devices)


def retire_keys(database: Database, settings: Settings) -> list[str]:
    """Destroys the private halves of the former keys on this host; their ids."""
    files = KeyFiles(settings.key_path)
    retired = files.kept()
    for former in retired:
        files.destroy(former)
    with database.writing() as session:
        for former in retired:
            KeyService(session, settings).note_retired(former)
    return retired


def shut_out(session: Session, settings: Settings) -> int:
    """Revokes every device of every tenant; what they trained waits for others. The number of them."""
    devices = DeviceService(session)
    live = DeviceRepository(session).live()
    for device in live:
        devices.revoke(device.tenant, device.id)
        for notify in REVOKED.get():
            notify(session, settings, device.id)
    return len(live)


class KeyRepository:
    """Keys in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, key: ServerKey) -> None:
        """Stores the key that signs from now on."""
        self._session.add(key)
        self._session.flush()

    def current(self) -> ServerKey | None:
        """The key that signs now; None while the home's first key was never written down."""
        return self._session.scalar(select(ServerKey).order_by(ServerKey.number.desc()).limit(1))

    def held(self, *, changing: bool) -> ServerKey | None:
        """The key that signs now, and does until this transaction ends. changing: and nobody else looks meanwhile."""
        statement = select(ServerKey).order_by(ServerKey.number.desc()).limit(1)
        found = self._session.scalar(statement.with_for_update(read=not changing))
        latest = self.current()
        # Whoever held it may have put another in its place while this waited.
        return found if latest is None or found is latest else self.held(changing=changing)

    def all(self) -> Sequence[ServerKey]:
        """Every key, oldest first."""
        return self._session.scalars(select(ServerKey).order_by(ServerKey.number)).all()


def server_info(key: Ed25519PublicKey) -> ServerInfo:
    """Version, and the key that devices pin."""
    return ServerInfo(version=version("mobizo"), public_key=public_text(key), key_id=key_id(key))
