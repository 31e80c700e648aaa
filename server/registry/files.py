"""The files of a version: a PEFT directory with the version's manifest, and other formats of the same B by name.

Devices upload B alone. All other files are generated from it when they are first requested, stored by their sha256, and
recorded in the database. If two requests generate the same file, the first one to commit counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.catalog.bases import BaseRepository
from server.catalog.calibrations.service import calibration_of
from server.database.database import Database
from server.registry.card import CARD, model_card
from server.registry.exports.gguf import gguf_lora, supported_form
from server.registry.exports.peft import CONFIG_NAME, TENSORS_NAME, peft_files
from server.registry.models import StoredPeftFile, StoredVersion
from server.registry.repository import AdapterRepository
from server.registry.trajectories.reconstruction import b_file
from server.storage.store import ArtifactStore, hold
from server.web.state import AppState
from shared.errors import FileNotInAdapter
from shared.recipe import Recipe
from shared.zo.lora import F32, load_adapter

RAW = "lora_B.safetensors"  # as the device uploaded it
MANIFEST = "mobizo.json"
GGUF_NAME, MODELFILE_NAME = "adapter.gguf", "Modelfile"
# For Ollama, which reads the chat template from the base's GGUF file. Users edit FROM for a base elsewhere.
MODELFILE = f"FROM ./base.gguf\nADAPTER ./{GGUF_NAME}\n".encode()
LISTED = (CARD, CONFIG_NAME, TENSORS_NAME, MANIFEST)


def flat_b(database: Database, artifacts: ArtifactStore, version: StoredVersion) -> F32:
    """Returns B of a version, float32 (D,)."""
    return load_adapter(artifacts.read(b_file(database, artifacts, version)), version.size_d)


def listing(state: AppState, version: StoredVersion) -> list[StoredPeftFile]:
    """Returns the files of a version's PEFT directory, by name, and generates missing ones."""
    return _files(state, version, LISTED)


def find(state: AppState, version: StoredVersion, path: str) -> StoredPeftFile:
    """Returns a file, listed or not. Raises FileNotInAdapter."""
    if path in LISTED:
        return next(file for file in listing(state, version) if file.path == path)
    if path == RAW:
        sha256 = b_file(state.database, state.artifacts, version)
        return StoredPeftFile(path=RAW, size=version.size, sha256=sha256)
    if path not in (GGUF_NAME, MODELFILE_NAME):
        raise FileNotInAdapter(f"version {version.version} has no file {path[:200]!r}")
    return _files(state, version, [path])[0]


def _files(state: AppState, version: StoredVersion, paths: Sequence[str]) -> list[StoredPeftFile]:
    """Returns these files, and generates missing ones outside of transactions. Runs in a thread of the pool."""
    database, artifacts = state.database, state.artifacts
    with database.reading() as session:
        rows = {row.path: row for row in AdapterRepository(session).generated_files(version)}
    absent = [path for path in paths if path not in rows]
    if absent:
        new_rows = [
            StoredPeftFile(version_number=version.number, path=path, size=len(data), sha256=artifacts.put(data))
            for path, data in _generate(database, artifacts, version, absent).items()
        ]
        rows = state.write_queue.run_from_thread(lambda: _record(database, artifacts, version, new_rows))
    return [rows[path] for path in sorted(paths)]


def _generate(
    database: Database, artifacts: ArtifactStore, version: StoredVersion, paths: Sequence[str]
) -> dict[str, bytes]:
    recipe, shape, a_sha256, signed = version.recipe, version.shape, version.a_sha256, version.signed
    generated: dict[str, bytes] = {}
    hub_id = _hub_id(database, recipe)
    if MANIFEST in paths:
        generated[MANIFEST] = (signed.model_dump_json(indent=1) + "\n").encode()
    if CARD in paths:
        generated[CARD] = model_card(signed.manifest, hub_id)
    if MODELFILE_NAME in paths:
        supported_form(version.shape)
        generated[MODELFILE_NAME] = MODELFILE
    rest = [path for path in paths if path not in generated]
    if rest:
        flat = flat_b(database, artifacts, version)
        arguments = recipe, shape, flat, a_sha256, calibration_of(artifacts, recipe)
        if {CONFIG_NAME, TENSORS_NAME} & set(rest):
            generated |= peft_files(*arguments, hub_id)
        if GGUF_NAME in rest:
            generated[GGUF_NAME] = gguf_lora(*arguments)
    return {path: generated[path] for path in paths}


def _hub_id(database: Database, recipe: Recipe) -> str | None:
    """Returns the Hub id of a recipe's base model, None if it has none or is not registered any more."""
    with database.reading() as session:
        base = BaseRepository(session).by_name(recipe.base.name)
        return base.hub_id if base is not None and base.sha256 == recipe.base.sha256 else None


def _record(
    database: Database, artifacts: ArtifactStore, version: StoredVersion, new_rows: Sequence[StoredPeftFile]
) -> dict[str, StoredPeftFile]:
    """Records files in the database and returns all of the version; one that was recorded in the meantime wins."""
    with database.writing() as session:
        adapters = AdapterRepository(session)
        rows = {row.path: row for row in adapters.generated_files(version)}
        hold(session, artifacts, [row.sha256 for row in new_rows])
        adapters.add(*(row for row in new_rows if row.path not in rows))
        return {row.path: row for row in new_rows} | rows
