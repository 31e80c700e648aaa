"""The adapter store: the newest version is used, the previous one stays, and no version is ever incomplete."""

import json

import numpy as np
import pytest

from device_agent.inference.adapter_store import AdapterStore
from shared.errors import InvalidUpload, NotFound, Untrusted
from shared.signing import new_private_key, sign_manifest
from shared.zo.lora import dump_adapter
from tests.device_agent.tiny import TASK
from tests.device_agent.warm_starts import vouched


@pytest.fixture
def manifest(rademacher):
    return rademacher.manifest


@pytest.fixture
def signed(manifest, server_key):
    return sign_manifest(manifest, server_key)


@pytest.fixture
def store(home):
    return AdapterStore(home)


def flat(manifest, value):
    return np.full(manifest.size, value, np.float32)


def keep(store, signed, value, job_id, name="alice-movies"):
    return store.add(name, dump_adapter(flat(signed.manifest, value), {}), signed, TASK, job_id)


def test_the_newest_is_opened_and_the_one_before_it_stays(store, signed, manifest, server_key):
    for number in (1, 2, 3):
        keep(store, signed, number, f"job-{number}")
    adapter = store.open("alice-movies", server_key.public_key())
    np.testing.assert_array_equal(adapter.flat, flat(manifest, 3))
    assert (adapter.about.job_id, adapter.about.task, adapter.manifest) == ("job-3", TASK, manifest)
    assert store.rollback("alice-movies").job_id == "job-2"
    np.testing.assert_array_equal(store.open("alice-movies", server_key.public_key()).flat, flat(manifest, 2))
    assert store.rollback("alice-movies").job_id == "job-3"
    keep(store, signed, 4, "job-4")
    assert store.rollback("alice-movies").job_id == "job-3"


def test_the_same_jobs_adapter_twice_is_kept_once(store, signed):
    first = keep(store, signed, 1, "job-1")
    assert keep(store, signed, 1, "job-1") == first
    assert not store.has_previous("alice-movies")
    with pytest.raises(NotFound, match="no previous version"):
        store.rollback("alice-movies")


def edit_about(home, edit):
    """Changes what a file in the store says of the first version."""
    path = home.path / "adapters" / "alice-movies" / "00000001" / "about.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_a_version_that_was_trained_here_is_the_registrys_once_it_was_pulled(store, rademacher, server_key, home):
    origin, data = vouched(rademacher, server_key, seed=1, version=7)
    signed = sign_manifest(rademacher.manifest, server_key)
    for known in (None, origin):
        store.add("alice-movies", data, signed, TASK, origin.manifest.job_id, known)
    assert not store.has_previous("alice-movies")
    assert store.open("alice-movies", server_key.public_key()).about.origin == origin
    edit_about(home, lambda document: document["origin"]["manifest"].update(version=9))
    with pytest.raises(Untrusted, match="signature"):
        store.open("alice-movies", server_key.public_key())


def test_names_are_listed_with_what_they_and_the_versions_before_need_of_the_cache(store, signed, server_key):
    assert store.stored() == []
    assert store.pins() == frozenset()
    manifest = signed.manifest
    moved = tuple(file.model_copy(update={"sha256": "e" * 64}) for file in manifest.files)
    keep(store, signed, 1, "job-1", "bob")
    keep(store, signed, 1, "job-2", "alice")
    assert store.names() == [about.name for about in store.stored()] == ["alice", "bob"]
    needed = {manifest.file(role).sha256 for role in ("weights", "tokenizer", "inference")}  # not to train
    assert store.pins() == needed
    keep(store, sign_manifest(manifest.model_copy(update={"files": moved}), server_key), 1, "job-3", "bob")
    assert store.pins() == {*needed, "e" * 64}


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(store, signed, manifest, server_key):
    keep(store, signed, 1, "job-1")
    with pytest.raises(InvalidUpload):
        store.add("alice-movies", dump_adapter(np.ones(3, np.float32), {}), signed, TASK, "job-2")
    np.testing.assert_array_equal(store.open("alice-movies", server_key.public_key()).flat, flat(manifest, 1))


def test_what_a_kill_leaves_aside_is_no_version(store, signed, home, server_key):
    keep(store, signed, 1, "job-1")
    aside = home.path / "adapters" / "alice-movies" / ".new"
    aside.mkdir()
    (aside / "adapter.safetensors").write_bytes(b"half")
    assert store.open("alice-movies", server_key.public_key()).about.job_id == "job-1"
    keep(store, signed, 2, "job-2")
    assert store.open("alice-movies", server_key.public_key()).about.job_id == "job-2"
    assert not aside.exists()


def test_another_servers_manifest_and_damaged_files_are_refused(store, signed, home, server_key):
    keep(store, signed, 1, "job-1")
    with pytest.raises(Untrusted, match="signature"):
        store.open("alice-movies", new_private_key().public_key())
    edit_about(home, lambda document: document["signed"]["manifest"].update(planned_bytes=7))
    with pytest.raises(Untrusted, match="signature"):
        store.open("alice-movies", server_key.public_key())
    file = home.path / "adapters" / "alice-movies" / "00000001" / "adapter.safetensors"
    file.write_bytes(dump_adapter(flat(signed.manifest, 9), {}))
    with pytest.raises(Untrusted, match="rollback alice-movies"):
        store.open("alice-movies", server_key.public_key())


def test_files_are_for_this_user_alone(store, signed, home):
    keep(store, signed, 1, "job-1")
    paths = list((home.path / "adapters").rglob("*"))
    assert len(paths) == 5
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}
