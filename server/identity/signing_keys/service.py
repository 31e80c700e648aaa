"""The keys that sign manifests: the current key, its rotation, and the statements that lead devices to it.

The table says which key signs; a host's file holds its private half. A rotation commits the table first, so a host
whose file is missing or outdated signs nothing, rather than signing what devices would reject.

keys/manifest.ed25519        the key that signs
keys/next.ed25519            the next key, while `key rotate` runs
keys/former/KEY_ID.ed25519   former keys, until `key retire` destroys them
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import String, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, utc_now
from server.database.database import Collision, Database, Repository
from server.identity.devices.repository import DeviceRepository
from server.identity.devices.service import revoke_device
from server.ports import Port
from server.settings import Settings
from shared.durable import new_file, sync
from shared.errors import Unavailable
from shared.key_rotation import ServerKeys, SignedKeyRotation, sign_key_rotation
from shared.protocol import ServerInfo
from shared.signing import key_id, new_private_key, parse_public, private_bytes, public_text


def create_key(path: Path) -> Ed25519PrivateKey:
    """Creates a key at `path`, readable by its owner only. Raises FileExistsError if there is one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = new_private_key()
    with new_file(path) as file:
        file.write(private_bytes(key))
    sync(path.parent)
    return key


def load_key(path: Path) -> Ed25519PrivateKey:
    """Returns the key at `path`. Raises Unavailable if it is missing, damaged, or readable by others."""
    try:
        mode = path.stat().st_mode
        raw = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"the signing key {path} cannot be read; run `mobizo-server init` first") from error
    if mode & 0o077:
        raise Unavailable(f"the signing key {path} is open to other users; run `chmod 600 {path}`")
    try:
        return Ed25519PrivateKey.from_private_bytes(raw)
    except ValueError as error:
        raise Unavailable(f"the signing key {path} is damaged; restore it from a backup") from error


@dataclass(frozen=True)
class KeyFiles:
    """The keys of one home. path: of the key that signs."""

    path: Path

    @property
    def following(self) -> Path:
        """Path of the next key."""
        return self.path.with_name("next.ed25519")

    @property
    def former(self) -> Path:
        """Directory of the former keys."""
        return self.path.with_name("former")

    def load(self) -> Ed25519PrivateKey:
        """Returns the key that signs. Raises Unavailable."""
        return load_key(self.path)

    def prepare(self) -> Ed25519PrivateKey:
        """Creates the next key, replacing one that an interrupted rotation left."""
        self.following.unlink(missing_ok=True)
        return create_key(self.following)

    def finish_rotation(self, current: str) -> None:
        """Moves the next key into place if it has the id `current`, and the previous key to the former ones.

        This also finishes a rotation that was killed after its commit. Calling it again changes nothing.
        """
        try:
            if key_id(load_key(self.following).public_key()) != current:
                return
        except Unavailable:
            return
        before = key_id(self.load().public_key())
        if before != current:
            self.former.mkdir(mode=0o700, exist_ok=True)
            # Another process on this host may do the same at this moment.
            with suppress(FileExistsError):
                os.link(self.path, self.former / f"{before}.ed25519")
            sync(self.former)
        with suppress(FileNotFoundError):
            self.following.replace(self.path)
        sync(self.path.parent)

    def former_ids(self) -> list[str]:
        """Returns the ids of the former keys whose private halves are on this host."""
        return sorted(path.stem for path in self.former.glob("*.ed25519")) if self.former.is_dir() else []

    def destroy(self, former: str) -> None:
        """Removes the private half of a former key."""
        (self.former / f"{former}.ed25519").unlink(missing_ok=True)
        if self.former.is_dir():
            sync(self.former)


class ServerKey(Numbered, Table):
    """A current or former signing key; the one with the highest number is current. Without rows, the key file is."""

    __tablename__ = "server_keys"

    key_id: Mapped[str] = mapped_column(String(16), unique=True)
    public_key: Mapped[str] = mapped_column(String(100))
    # Statement of the previous key; null for the first key and after a compromise.
    rotation: Mapped[SignedKeyRotation | None] = mapped_column(Document(SignedKeyRotation))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    compromised_at: Mapped[datetime | None] = mapped_column(UtcTime)
    retired_at: Mapped[datetime | None] = mapped_column(UtcTime)  # its private key was destroyed


# Called in the transaction of a rotation: each signs the documents of one feature with the new key, and returns their
# number.
RESIGNERS: Port[tuple[Callable[[Session, Ed25519PrivateKey], int], ...]] = Port("signing_keys.resigners")
# Called there too, with the former key (None: it is compromised) and the next: encrypts secrets with the next key.
RESEAL: Port[Callable[[Session, Ed25519PrivateKey | None, Ed25519PrivateKey], None]] = Port("signing_keys.reseal")


@dataclass(frozen=True)
class Rotated:
    """The result of a rotation: ids of the key before and after, numbers of documents signed and devices revoked."""

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
        """Returns the current key. Raises Unavailable if there is none."""
        current = self._keys.current()
        return self._files.load().public_key() if current is None else parse_public(current.public_key)

    def private(self, *, changing: bool = False) -> Ed25519PrivateKey:
        """Returns the key to sign with, and blocks rotations until this transaction ends.

        Raises Unavailable if this host does not have it.
        """
        current = self._keys.current_locked(changing=changing)
        if current is None:
            return self._files.load()
        self._files.finish_rotation(current.key_id)
        key = self._files.load()
        if key_id(key.public_key()) != current.key_id:
            raise Unavailable(
                f"this host has the signing key {key_id(key.public_key())}, but {current.key_id} signs now: copy "
                f"{self._files.path} here from the host where `mobizo-server key rotate` ran"
            )
        return key

    def chain(self) -> ServerKeys:
        """Returns the current key and the statements that lead to it since the last compromise."""
        rotations = []
        for row in reversed(self._keys.all()):
            if row.rotation is None:
                break
            rotations.append(row.rotation)
        public = self.public()
        return ServerKeys(public_key=public_text(public), key_id=key_id(public), rotations=rotations[::-1])

    def record_first(self) -> None:
        """Records the home's first key if no key is recorded."""
        if self._keys.current() is None:
            self._add(self._files.load().public_key(), None)

    def rotate(self, following: Ed25519PrivateKey, *, compromised: bool) -> int:
        """Makes `following` the current key, signs every program with it, and returns their number.

        compromised: the previous key is no longer trusted and signs no statement, so that devices must enroll again.
        Raises Unavailable if this host lacks the previous key.
        """
        public, statement, former = following.public_key(), None, None
        if compromised:
            for row in self._keys.all():
                row.compromised_at = row.compromised_at or utc_now()
            self._keys.current_locked(changing=True)
        else:
            former = self.private(changing=True)
            statement = sign_key_rotation(former, public, utc_now())
        self._add(public, statement)
        RESEAL.get()(self._session, former, following)
        return sum(sign_again(self._session, following) for sign_again in RESIGNERS.get())

    def record_retired(self, former: str) -> None:
        """Records that the private half of a former key was destroyed."""
        for row in self._keys.all():
            if row.key_id == former:
                row.retired_at = row.retired_at or utc_now()

    def _add(self, public: Ed25519PublicKey, statement: SignedKeyRotation | None) -> None:
        row = ServerKey(key_id=key_id(public), public_key=public_text(public), rotation=statement, created_at=utc_now())
        self._keys.add(row)


def prepare_keys(database: Database, settings: Settings) -> None:
    """Records the first key if none is recorded, and finishes a rotation that was interrupted.

    Raises Unavailable if the home has no key.
    """
    files = KeyFiles(settings.key_path)
    current_id = _current_key_id(database)
    if current_id is None:
        files.load()
        try:
            with database.writing() as session:
                KeyService(session, settings).record_first()
            return
        except (IntegrityError, Collision):
            current_id = _current_key_id(database)  # another process may have recorded it at this moment
            if current_id is None:
                raise
    files.finish_rotation(current_id)


def _current_key_id(database: Database) -> str | None:
    with database.reading() as session:
        current = KeyRepository(session).current()
        return None if current is None else current.key_id


def rotate_key(database: Database, settings: Settings, *, compromised: bool) -> Rotated:
    """Creates a key that signs from now on. A rotation that is killed is either done or not done.

    compromised: also revokes every device, since it must enroll again. Raises Unavailable.
    """
    # First, because a rotation that was killed may have left the only copy of the current key as the next key.
    prepare_keys(database, settings)
    files = KeyFiles(settings.key_path)
    before = key_id(files.load().public_key())
    following = files.prepare()
    with database.writing() as session:
        signed = KeyService(session, settings).rotate(following, compromised=compromised)
        devices = revoke_all(session) if compromised else 0
    files.finish_rotation(key_id(following.public_key()))
    if compromised:
        files.destroy(before)
    return Rotated(before, key_id(following.public_key()), signed, devices)


def retire_keys(database: Database, settings: Settings) -> list[str]:
    """Destroys the private halves of the former keys on this host; returns their ids."""
    files = KeyFiles(settings.key_path)
    retired = files.former_ids()
    for former in retired:
        files.destroy(former)
    with database.writing() as session:
        for former in retired:
            KeyService(session, settings).record_retired(former)
    return retired


def revoke_all(session: Session) -> int:
    """Revokes every device of every tenant; their jobs wait for other devices. Returns the number of devices."""
    live = DeviceRepository(session).live()
    for device in live:
        revoke_device(session, device.tenant, device.id)
    return len(live)


class KeyRepository(Repository):
    """Keys in one session."""

    def current(self) -> ServerKey | None:
        """Returns the current key; None if the home's first key was not recorded yet."""
        return self._session.scalar(select(ServerKey).order_by(ServerKey.number.desc()).limit(1))

    def current_locked(self, *, changing: bool) -> ServerKey | None:
        """Returns the current key, locked until this transaction ends. changing: locked exclusively, for a rotation."""
        statement = select(ServerKey).order_by(ServerKey.number.desc()).limit(1)
        locked = self._session.scalar(statement.with_for_update(read=not changing))
        latest = self.current()
        # A rotation may have replaced it while this transaction waited.
        return locked if latest is None or locked is latest else self.current_locked(changing=changing)

    def all(self) -> Sequence[ServerKey]:
        """Returns every key, oldest first."""
        return self._all(ServerKey)


def server_info(key: Ed25519PublicKey) -> ServerInfo:
    """Returns the version, and the key that devices pin when they enroll."""
    return ServerInfo(version=version("mobizo"), public_key=public_text(key), key_id=key_id(key))
