"""A version's manifest: made with it, signed by the server, and signed anew where that was not or is not enough."""

import hashlib
import json

import pytest
import rfc8785

from server.identity.signing_keys.service import load_key, prepare_keys, rotate_key
from server.registry.card import model_card
from server.registry.purge import sign_backlog
from shared.canonical import sha256_hex
from shared.errors import Untrusted
from shared.registry import SignedAdapter
from shared.signing import verify_adapter
from tests.server.actors import adapter_bytes, result
from tests.server.registry.conftest import URL


def fetched(app, version=1):
    """mobizo.json of a version, as bytes."""
    answer = app.get(f"{URL}/versions/{version}/peft/mobizo.json")
    assert answer.status_code == 200, answer.text
    return answer.content


def public_key(home):
    return load_key(home.settings.key_path).public_key()


def test_the_manifest_tells_where_a_version_comes_from(home, app, device, publish):
    version = publish(0.25, tuned_accuracy=0.9)
    document = json.loads(fetched(app))
    facts = document["manifest"]
    job = app.get(f"/v1/jobs/{version['job_id']}").json()
    # Independently of our own code: canonical JSON by its library, a digest by Python's.
    assert hashlib.sha256(rfc8785.dumps(facts)).hexdigest()[:40] == version["revision"]
    names = ("tenant", "adapter", "version", "user", "device_id", "parent")
    assert [facts[name] for name in names] == ["default", "alice-movies", 1, "alice", device.device_id, None]
    assert facts["base"] == job["recipe"]["base"]
    assert facts["task"] == job["task"]
    assert facts["training"] == job["request"]["training"]
    assert facts["result"]["tuned_accuracy"] == 0.9
    for name in ("recipe", "recipe_id", "a_sha256", "sha256", "size", "size_d", "job_id"):
        assert facts[name] == version[name], name
    card = app.get(f"{URL}/versions/1/peft/README.md").text
    for fact in (facts["job_id"], facts["recipe_id"], facts["a_sha256"], facts["sha256"], facts["base"]["sha256"]):
        assert fact in card
    assert "| trained from | B = 0 |" in card
    signed = SignedAdapter.model_validate(document)
    assert verify_adapter(signed, public_key(home)).revision == version["revision"]


def test_a_card_is_one_table_whatever_names_say(app, publish):
    publish()
    manifest = SignedAdapter.model_validate_json(fetched(app)).manifest
    base = manifest.base.model_copy(update={"name": "a|b\n\n# c"})
    changed_manifest = manifest.model_copy(update={"recipe": manifest.recipe.model_copy(update={"base": base})})
    card = model_card(changed_manifest).decode()
    assert "| base model | a\\|b # c (sha256 " in card
    assert "\n# c" not in card
    assert "reference texts" not in card
    scored = manifest.model_copy(update={"result": manifest.result.model_copy(update={"reference_loss_change": 0.02})})
    assert "| loss of the reference texts | +2.0% |" in model_card(scored).decode()


def test_after_a_rotation_the_new_key_has_signed(home, app, publish):
    prepare_keys(home.database, home.settings)
    first = publish()
    before, old = fetched(app), public_key(home)
    rotate_key(home.database, home.settings, compromised=False)
    assert sign_backlog(home.database, home.settings) == 1
    after = fetched(app)
    assert json.loads(after)["manifest"] == json.loads(before)["manifest"]
    assert app.get(f"{URL}/versions/1").json() == first
    verify_adapter(SignedAdapter.model_validate_json(after), public_key(home))
    with pytest.raises(Untrusted):
        verify_adapter(SignedAdapter.model_validate_json(after), old)
    files = {file["path"]: file for file in app.get(f"{URL}/versions/1/peft").json()["files"]}
    assert files["mobizo.json"]["sha256"] == hashlib.sha256(after).hexdigest()


def test_a_host_without_the_key_publishes_nothing(home, app, device, lease, problem):
    size = lease["manifest"]["manifest"]["size"]
    prepare_keys(home.database, home.settings)
    key = home.settings.key_path.read_bytes()
    rotate_key(home.database, home.settings, compromised=False)
    home.settings.key_path.write_bytes(key)
    data = adapter_bytes(size)
    assert device.upload(lease, data).status_code == 200
    body = {"adapter_sha256": sha256_hex(data), "result": result()}
    problem(device.post(f"/v1/leases/{lease['id']}/complete", json=body), 503, "unavailable")
    assert app.get("/v1/adapters").json()["items"] == []
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"


def test_a_version_that_went_on_from_another_says_so(app, publish):
    first = publish(0.25, tuned_accuracy=0.75)
    start = {"start": {"adapter": "alice-movies", "revision": "v1"}}
    scores = {"zero_shot_accuracy": None, "start_accuracy": 0.6}
    better = publish(job=start, **scores, tuned_accuracy=0.8)
    parent = {"adapter": "alice-movies", "version": 1, "revision": first["revision"]}
    assert (better["parent"], better["state"]) == (parent, "approved")
    assert json.loads(fetched(app, 2))["manifest"]["parent"] == parent
    card = app.get(f"{URL}/versions/2/peft/README.md").text
    assert f"| trained from | alice-movies, version 1 |\n| its revision | {first['revision']} |" in card
    assert "| test accuracy before | 60.0% |" in card
    # Better than it was on this device's data, and still worse than its parent was on its own.
    worse = publish(job=start, **scores, tuned_accuracy=0.7)
    assert (worse["state"], worse["message"]) == ("held", "the score fell from 75.0% to 70.0%")
    # An accuracy on the examples that chose the adapter is called so, and is not compared with one on test examples.
    other = publish(job=start, **scores, tuned_accuracy=0.7, accuracy_split="validation")
    assert other["state"] == "approved"
    card = app.get(f"{URL}/versions/{other['version']}/peft/README.md").text
    assert "| validation accuracy before | 60.0% |" in card
    assert "| validation accuracy after | 70.0%, on the examples by which the adapter was chosen |" in card
