"""Registry versions in the adapter store: signature and hash of each are verified, or it is not stored."""

import numpy as np
import pytest

from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.pull import parse_reference, pull
from device_agent.programs import check_rollback
from device_agent.protocol.client import DeviceClient
from shared.errors import AdapterNotFound, BadRequest, Untrusted
from shared.protocol import DeviceAdapter
from shared.registry import SignedAdapter
from shared.signing import new_private_key, sign_adapter, sign_manifest
from tests.device_agent.warm_starts import random_b, vouched

NAME = "alice-movies"


@pytest.fixture
def server(server, rademacher, enrolled):
    for role in ("inference", "weights", "tokenizer"):
        server.files[rademacher.manifest.file(role).sha256] = rademacher.path(role).read_bytes()
    return server


@pytest.fixture
def publish(server, server_key, rademacher):
    """Has the server know a version under these revisions."""

    def publish(*revisions, signed=None, data=None, program=None, **facts):
        vouched_version = vouched(rademacher, server_key, **facts)
        device_adapter = DeviceAdapter(
            adapter=signed or vouched_version[0], program=program or sign_manifest(rademacher.manifest, server_key)
        )
        for revision in (*revisions, device_adapter.adapter.manifest.revision):
            server.versions[NAME, revision] = (device_adapter, vouched_version[1] if data is None else data)
        return device_adapter.adapter.manifest

    return publish


@pytest.fixture
def fetch(home, server):
    def fetch(revision, name=NAME):
        with DeviceClient(server.url, "device-token") as client:
            return pull(home, client, name, revision)

    return fetch


@pytest.fixture
def open_adapter(home):
    return lambda: AdapterStore(home).open(NAME, *home.config().trusted_keys())


def test_a_pulled_version_is_the_newest_and_the_one_before_it_stays(home, publish, fetch, open_adapter, rademacher):
    publish("v1", seed=1, version=1)
    second = publish("main", "v2", seed=2, version=2)
    about, files = fetch("v1")
    assert [file.role for file in files] == ["inference", "weights", "tokenizer"]
    np.testing.assert_array_equal(open_adapter().flat, random_b(rademacher.manifest, 1))
    about, files = fetch("main")
    assert not files
    assert about.origin.manifest == second
    assert about.description == "version 2, of job job-of-2"
    np.testing.assert_array_equal(open_adapter().flat, random_b(rademacher.manifest, 2))
    assert AdapterStore(home).has_previous(NAME)
    assert fetch(second.revision)[0].origin.manifest == second


def test_a_version_that_this_device_may_not_have_is_not_there(publish, fetch, home):
    publish("main")
    with pytest.raises(AdapterNotFound):
        fetch("main", "bob-movies")
    assert not AdapterStore(home).stored()


@pytest.mark.parametrize(
    ("facts", "revision", "words"),
    [
        ({"version": 2}, "v1", "sent version 2"),
        ({"adapter": "bob-movies"}, "main", "'bob-movies'"),
        ({"a_sha256": "0" * 64}, "main", "frozen A"),
        ({"size_d": 7}, "main", "D 7"),
        ({}, "0" * 40, "sent version 1"),
    ],
)
def test_what_was_not_asked_for_or_does_not_fit_is_refused(publish, fetch, home, facts, revision, words):
    publish("main", revision, **facts)
    with pytest.raises(Untrusted, match=words):
        fetch(revision)
    assert not AdapterStore(home).stored()


def test_another_servers_word_changed_bytes_and_an_old_program_are_refused(
    publish, fetch, server, server_key, rademacher, home
):
    signed, data = vouched(rademacher, server_key)
    false = sign_adapter(signed.manifest, new_private_key())
    publish("main", signed=SignedAdapter(**dict(false) | {"key_id": signed.key_id}))
    with pytest.raises(Untrusted, match="signature"):
        fetch("main")
    publish("main", program=sign_manifest(rademacher.manifest, new_private_key()))
    with pytest.raises(Untrusted, match="signature"):
        fetch("main")
    publish("main", data=data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Untrusted, match="size and sha256"):
        fetch("main")
    check_rollback(home.program_versions, rademacher.manifest.model_copy(update={"version": 2}))
    publish("main")
    with pytest.raises(Untrusted, match="has seen version 2"):
        fetch("main")
    assert not AdapterStore(home).stored()


@pytest.mark.parametrize("text", ["", "../x", "a@", "a@b/c", "a@..", "A@main", "a@b@c"])
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(BadRequest, match="NAME@REVISION"):
        parse_reference(text)
