"""The files of a version: a PEFT directory with the version's facts, and other forms of the same B by name.

What is uploaded is B alone. All else is made of it when it is first asked for, stored by its content, and named in the
database; of two requests at once, the first to commit counts. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.adapters.card import CARD, model_card
from server.adapters.models import StoredPeftFile, StoredVersion
from server.adapters.repository import AdapterRepository
from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.calibrations.reading import calibration_of
from server.db.database import Database
from server.formats.peft import CONFIG_NAME, TENSORS_NAME, peft_files
from server.formats.table import CONVERTERS
from server.history.remaking import b_file
from shared.errors import FileNotInAdapter
from shared.lora import F32, load_adapter

RAW = "lora_B.safetensors"  # as the device uploaded it
MANIFEST = "mobizo.json"
LISTED = (CARD, CONFIG_NAME, TENSORS_NAME, MANIFEST)


@dataclass(frozen=True)
class AdapterFile:
    """A stored file of a version, by the path that it has there."""

    path: str
    size: int
    sha256: str


def flat_b(database: Database, artifacts: ArtifactStore, version: StoredVersion) -> F32:
    """B of a version, float32 (D,)."""
    return load_adapter(artifacts.read(b_file(database, artifacts, version)), version.size_d)


def listing(database: Database, artifacts: ArtifactStore, version: StoredVersion) -> list[AdapterFile]:
    """The files of a version's PEFT directory, by name; made if they are not there yet."""
    return _having(database, artifacts, version, LISTED)


def extra(database: Database, artifacts: ArtifactStore, version: StoredVersion, path: str) -> AdapterFile:
    """A file that is not in the listing. Raises FileNotInAdapter."""
    if path == RAW:
        return AdapterFile(RAW, version.size, b_file(database, artifacts, version))
    if path not in CONVERTERS:
        raise FileNotInAdapter(f"version {version.version} has no file {path[:200]!r}")
    return _having(database, artifacts, version, [path])[0]


def find(database: Database, artifacts: ArtifactStore, version: StoredVersion, path: str) -> AdapterFile:
    """A file of the listing or beside it. Raises FileNotInAdapter."""
    if path not in LISTED:
        return extra(database, artifacts, version, path)
    return next(file for file in listing(database, artifacts, version) if file.path == path)


def _having(
    database: Database, artifacts: ArtifactStore, version: StoredVersion, paths: Sequence[str]
) -> list[AdapterFile]:
    """These files, those that are not there made outside of any transaction."""
    with database.reading() as session:
        made = {row.path: row for row in AdapterRepository(session).made_files(version)}
        session.expunge_all()
    files = {path: AdapterFile(path, row.size, row.sha256) for path, row in made.items()}
    absent = [path for path in paths if path not in files]
    if absent:
        fresh = [_stored(artifacts, path, data) for path, data in _make(database, artifacts, version, absent).items()]
        files |= {file.path: file for file in _name(database, artifacts, version, fresh)}
    return [files[path] for path in sorted(paths)]


def _make(
    database: Database, artifacts: ArtifactStore, version: StoredVersion, paths: Sequence[str]
) -> dict[str, bytes]:
    recipe, shape, a_sha256, signed = version.recipe, version.shape, version.a_sha256, version.signed
    found: dict[str, bytes] = {}
    if MANIFEST in paths:
        found[MANIFEST] = (signed.model_dump_json(indent=1) + "\n").encode()
    if CARD in paths:
        found[CARD] = model_card(signed.manifest)
    rest = [path for path in paths if path not in found]
    if rest:
        flat = flat_b(database, artifacts, version)
        made_of = recipe, shape, flat, a_sha256, calibration_of(artifacts, recipe)
        found |= peft_files(*made_of) if {CONFIG_NAME, TENSORS_NAME} & set(rest) else {}
        found |= {path: CONVERTERS[path](*made_of) for path in rest if path in CONVERTERS}
    return {path: found[path] for path in paths}


def _stored(artifacts: ArtifactStore, path: str, data: bytes) -> AdapterFile:
    return AdapterFile(path, len(data), artifacts.put(data))


def _name(
    database: Database, artifacts: ArtifactStore, version: StoredVersion, files: list[AdapterFile]
) -> list[AdapterFile]:
    """Names files in the database, and those that count: who named one meanwhile was first."""
    with database.writing() as session:
        adapters = AdapterRepository(session)
        named = {row.path: row for row in adapters.made_files(version)}
        hold(session, artifacts, [file.sha256 for file in files])
        for file in files:
            if file.path not in named:
                row = StoredPeftFile(version_number=version.number, path=file.path, size=file.size, sha256=file.sha256)
                adapters.add(row)
                named[file.path] = row
        return [AdapterFile(file.path, named[file.path].size, named[file.path].sha256) for file in files]
