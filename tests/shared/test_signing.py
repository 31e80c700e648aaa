import base64

import pytest

from shared.errors import Untrusted
from shared.program import ProgramFile, ProgramManifest
from shared.protocol import RunnerBuild
from shared.signing import (
    key_id,
    new_private_key,
    parse_public,
    public_text,
    sign_manifest,
    sign_runner_build,
    verify_manifest,
    verify_runner_build,
)


@pytest.fixture
def manifest(recipe, shape):
    files = tuple(
        ProgramFile(role=role, name=name, size=3, sha256="0" * 64)
        for role, name in (("program", "program.pte"), ("weights", "weights.ptd"), ("tokenizer", "tokenizer.json"))
    )
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=shape,
        size=384,
        a_sha256="1" * 64,
        score_rows=recipe.score_rows,
        files=files,
        planned_bytes=1,
        flops_per_step=1,
        delegates=1,
        nodes=1,
        executorch="1.5.1",
    )


def test_a_signed_manifest_verifies_after_its_journey_as_json(manifest):
    key = new_private_key()
    signed = sign_manifest(manifest, key)
    arrived = type(signed).model_validate_json(signed.model_dump_json())
    public = parse_public(public_text(key.public_key()))
    assert verify_manifest(arrived, public) == manifest
    assert signed.key_id == key_id(public)


def test_any_change_or_another_key_is_refused(manifest):
    key = new_private_key()
    signed = sign_manifest(manifest, key)
    changed = signed.model_copy(update={"manifest": manifest.model_copy(update={"planned_bytes": 2})})
    forged = signed.model_copy(update={"signature": base64.b64encode(bytes(64)).decode()})
    garbled = signed.model_copy(update={"signature": "not base64!"})
    for bad in (changed, forged, garbled):
        with pytest.raises(Untrusted, match="signature"):
            verify_manifest(bad, key.public_key())
    with pytest.raises(Untrusted, match="signature"):
        verify_manifest(signed, new_private_key().public_key())


def test_a_recipe_id_that_does_not_fit_its_recipe_is_refused(manifest):
    key = new_private_key()
    signed = sign_manifest(manifest.model_copy(update={"recipe_id": "2" * 64}), key)
    with pytest.raises(Untrusted, match="recipe"):
        verify_manifest(signed, key.public_key())


@pytest.mark.parametrize("name", ["../weights.ptd", "a/b", "", ".hidden", "/etc/passwd", "x" * 200])
def test_a_manifest_cannot_name_a_path(name):
    with pytest.raises(ValueError, match="name"):
        ProgramFile(role="weights", name=name, size=1, sha256="0" * 64)


def test_parse_public_refuses_what_is_no_key():
    with pytest.raises(Untrusted):
        parse_public("AAAA")


@pytest.fixture
def build():
    return RunnerBuild(platform="linux-aarch64", version="0.4.0", executorch="1.5.1", size=3, sha256="3" * 64)


def test_a_signed_runner_verifies_after_its_journey_as_json(build):
    key = new_private_key()
    signed = sign_runner_build(build, key)
    arrived = type(signed).model_validate_json(signed.model_dump_json())
    assert verify_runner_build(arrived, key.public_key()) == build
    assert signed.key_id == key_id(key.public_key())


def test_a_changed_runner_and_another_servers_are_refused(build):
    key = new_private_key()
    signed = sign_runner_build(build, key)
    for change in ({"sha256": "4" * 64}, {"platform": "linux-x86_64"}, {"version": "0.3.0"}, {"size": 4}):
        changed = signed.model_copy(update={"build": build.model_copy(update=change)})
        with pytest.raises(Untrusted, match="the runner's signature"):
            verify_runner_build(changed, key.public_key())
    with pytest.raises(Untrusted, match="the runner's signature"):
        verify_runner_build(signed, new_private_key().public_key())


def test_the_signature_is_ed25519_over_the_canonical_json(build):
    key = new_private_key()
    text = (
        '{"executorch":"1.5.1","format":1,"platform":"linux-aarch64",'
        '"sha256":"' + "3" * 64 + '","size":3,"version":"0.4.0"}'
    )
    key.public_key().verify(base64.b64decode(sign_runner_build(build, key).signature), text.encode())
