"""The operator's commands about signing keys."""

import json

import pytest

from server.identity.signing_keys.service import KeyFiles, load_key
from shared.errors import BadRequest
from shared.signing import key_id


def test_from_one_key_to_the_next_and_the_last(command, home, fleet, device):
    path = home.settings.key_path
    first = key_id(load_key(path).public_key())
    (row,) = json.loads(command("key", "list", "--json"))
    assert (row["id"], row["state"], row["private_key"]) == (first, "current", "present")
    rotation = json.loads(command("key", "rotate", "--json"))
    second = key_id(load_key(path).public_key())
    assert rotation == {"before": first, "after": second, "signed": 0, "adapter_versions": 0, "devices_shut_out": 0}
    keys = [(row["id"], row["state"], row["private_key"]) for row in json.loads(command("key", "list", "--json"))]
    assert keys == [(first, "former", "present"), (second, "current", "present")]
    assert json.loads(command("key", "retire", "--json")) == {"retired": [first]}
    with pytest.raises(BadRequest, match="nothing was changed"):
        command("key", "rotate", "--compromised", typed="n\n")
    text = command("key", "rotate", "--compromised", "--yes")
    third = key_id(load_key(path).public_key())
    assert f"{second} is destroyed and no longer trusted; 1 devices must enroll again" in text
    rows = json.loads(command("key", "list", "--json"))
    assert [(row["id"], row["state"], row["private_key"]) for row in rows] == [
        (first, "compromised", "absent"),
        (second, "compromised", "absent"),
        (third, "current", "present"),
    ]
    assert rows[0]["retired_at"]
    assert KeyFiles(path).former_ids() == []
    assert fleet.actor().get("/v1/server/keys").json()["rotations"] == []
