"""One signing key after another, with devices that follow, hosts that lag behind, and commands that are killed."""

import shutil
import stat

import pytest
from sqlalchemy import select

from device_agent.home import AgentHome, DeviceConfig
from device_agent.programs import check_rollback, follow_key_rotation
from device_agent.protocol.client import DeviceClient
from server.identity.signing_keys.service import (
    KeyFiles,
    KeyRepository,
    KeyService,
    prepare_keys,
    retire_keys,
    rotate_key,
)
from server.programs.service import Program
from shared.errors import Unavailable, Untrusted
from shared.key_rotation import ServerKeys, follow
from shared.program import SignedManifest
from shared.protocol import LeaseRequest
from shared.signing import key_id, parse_public, verify_manifest


def rotate(home, compromised=False):
    return rotate_key(home.database, home.settings, compromised=compromised)


def server_keys(fleet):
    """Who signs now, and the chain."""
    keys = ServerKeys.model_validate(fleet.actor().get("/v1/server/keys").json())
    info = fleet.actor().get("/v1/server").json()
    assert (info["public_key"], info["key_id"]) == (keys.public_key, keys.key_id)
    return keys


@pytest.fixture
def files(home):
    return KeyFiles(home.settings.key_path)


@pytest.fixture
def agent(fleet, device, tmp_path):
    """A device's home as enrollment leaves it, and its client."""
    home = AgentHome(tmp_path / "agent")
    home.create()
    info = fleet.actor().get("/v1/server").json()
    pinned = {"public_key": info["public_key"], "key_id": info["key_id"]}
    home.enroll(DeviceConfig(server=fleet.url, name="phone", device_id=device.device_id, token=device.token, **pinned))
    with DeviceClient(fleet.url, device.token, device.signer._key) as client:
        yield home, client


@pytest.mark.both_databases
def test_programs_are_signed_anew_and_stay_what_they_are(fleet, home, app, device, lease):
    before = server_keys(fleet)
    rotation = rotate(home)
    assert (rotation.before, rotation.signed, rotation.devices) == (before.key_id, 1, 0)
    after = server_keys(fleet)
    assert after.key_id == rotation.after != before.key_id
    key = parse_public(after.public_key)
    manifest = SignedManifest.model_validate(app.get(f"/v1/programs/{lease['job']['recipe_id']}").json())
    assert verify_manifest(manifest, key) == SignedManifest.model_validate(lease["manifest"]).manifest
    assert manifest.key_id == rotation.after
    fleet.ready_job(app, adapter="other", recipe={"rank": 1})
    assert {program.signed.key_id for program in home.scalars(select(Program))} == {rotation.after}
    with pytest.raises(Untrusted):
        verify_manifest(manifest, parse_public(before.public_key))
    assert device.finish(lease)["version"] == 1


def test_a_device_follows_over_several_rotations_at_once(fleet, home, agent, device, lease):
    place, client = agent
    first = place.config()
    check_rollback(place.program_versions, SignedManifest.model_validate(lease["manifest"]).manifest)
    program_versions = place.program_versions.read_bytes()
    for _ in range(3):
        rotate(home)
    retire_keys(home.database, home.settings)
    signed = client.lease(LeaseRequest(datasets=["movies"])).manifest
    with pytest.raises(Untrusted):
        verify_manifest(signed, parse_public(first.public_key))
    config = follow_key_rotation(place, first, client, signed.key_id)
    assert verify_manifest(signed, parse_public(config.public_key))
    assert place.config() == config
    assert config.key_id == server_keys(fleet).key_id
    assert config.former_keys[0] == first.public_key
    assert [key_id(key) for key in config.trusted_keys()] == [
        config.key_id,
        *(key_id(parse_public(text)) for text in reversed(config.former_keys)),
    ]
    assert place.program_versions.read_bytes() == program_versions
    assert stat.S_IMODE((place.path / "config.json").stat().st_mode) == 0o600


def test_after_a_compromise_no_chain_leads_on_and_devices_are_shut_out(fleet, home, app, agent, device, lease, problem):
    place, client = agent
    before = server_keys(fleet)
    rotate(home)
    middle = server_keys(fleet)
    rotation = rotate(home, compromised=True)
    after = server_keys(fleet)
    assert (rotation.before, rotation.devices, after.rotations) == (middle.key_id, 1, [])
    for pinned in (before, middle):
        with pytest.raises(Untrusted, match="enroll this device again"):
            follow(pinned.public_key, after)
    assert follow_key_rotation(place, place.config(), client, after.key_id) == place.config()
    problem(device.post("/v1/leases", json={"datasets": []}), 401, "unauthorized")
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert job["state"] == "ready"
    assert rotation.before not in KeyFiles(home.settings.key_path).former_ids()
    again = fleet.device()
    signed = SignedManifest.model_validate(again.lease()["manifest"])
    verify_manifest(signed, parse_public(after.public_key))
    rotate(home)
    assert [link.rotation.previous_key for link in server_keys(fleet).rotations] == [after.public_key]


def test_private_halves_are_kept_aside_until_they_are_retired(home, files):
    first = key_id(files.load().public_key())
    rotation = rotate(home)
    assert files.former_ids() == [first]
    for path in (files.path, files.former / f"{first}.ed25519"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_id(files.load().public_key()) == rotation.after
    assert not files.following.exists()
    assert retire_keys(home.database, home.settings) == [first]
    assert files.former_ids() == []
    assert retire_keys(home.database, home.settings) == []


@pytest.mark.both_databases
def test_servers_that_start_at_once_record_the_first_key_once(home, monkeypatch):
    """This one reads twice that no key is recorded, while another process records it."""
    prepare_keys(home.database, home.settings)
    current, readings = KeyRepository.current, iter([None, None])
    monkeypatch.setattr(KeyRepository, "current", lambda self: next(readings, current(self)))
    prepare_keys(home.database, home.settings)
    assert next(readings, "both were used") == "both were used"
    with home.database.reading() as session:
        assert len(KeyRepository(session).all()) == 1


class Killed(BaseException):
    """The process ends here."""


def test_a_rotation_killed_before_its_commit_did_not_happen(fleet, home, files, monkeypatch):
    before = server_keys(fleet)
    monkeypatch.setattr(KeyService, "rotate", lambda *_, **__: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        rotate(home)
    monkeypatch.undo()
    assert files.following.exists()
    assert server_keys(fleet) == before
    prepare_keys(home.database, home.settings)
    assert key_id(files.load().public_key()) == before.key_id
    assert rotate(home).before == before.key_id
    assert len(server_keys(fleet).rotations) == 1


def kill_before_settling(home, monkeypatch):
    """Rotates up to the commit."""
    finish_rotation, before = KeyFiles.finish_rotation, key_id(KeyFiles(home.settings.key_path).load().public_key())

    def finish_or_die(self, current):
        if current != before:
            raise Killed
        finish_rotation(self, current)

    monkeypatch.setattr(KeyFiles, "finish_rotation", finish_or_die)
    with pytest.raises(Killed):
        rotate(home)
    monkeypatch.undo()


def test_a_rotation_killed_after_its_commit_is_finished_by_who_signs_next(fleet, home, app, files, monkeypatch):
    before = server_keys(fleet)
    kill_before_settling(home, monkeypatch)
    after = server_keys(fleet)
    assert key_id(files.load().public_key()) == before.key_id != after.key_id
    with home.database.writing() as session:
        assert key_id(KeyService(session, home.settings).private().public_key()) == after.key_id
    assert files.former_ids() == [before.key_id]
    assert follow(before.public_key, after) == [after.public_key]


def test_a_rotation_after_one_that_was_killed_loses_no_key(fleet, home, files, monkeypatch):
    before = server_keys(fleet)
    kill_before_settling(home, monkeypatch)
    middle = server_keys(fleet)
    assert rotate(home).before == middle.key_id
    assert files.former_ids() == sorted([before.key_id, middle.key_id])
    assert len(follow(before.public_key, server_keys(fleet))) == 2


def test_a_host_without_the_new_key_signs_nothing_and_says_what_to_copy(home, files, tmp_path):
    shutil.copy(files.path, tmp_path / "old")
    rotation = rotate(home)
    new = files.path.read_bytes()
    files.path.write_bytes((tmp_path / "old").read_bytes())
    with home.database.writing() as session, pytest.raises(Unavailable, match=f"{rotation.after} signs now: copy"):
        KeyService(session, home.settings).private()
    with pytest.raises(Unavailable, match="copy"):
        rotate(home)
    files.path.write_bytes(new)
    assert rotate(home).before == rotation.after
