"""The stock clients fetch from a bucket what the server sends them there for, and go on there."""

from pathlib import Path

import pytest

from server.settings import Delivery, Settings
from server.storage.opening import open_artifacts
from tests.server.actors import Fleet
from tests.server.homes import copy_home, home_of
from tests.server.operations.test_serving import running
from tests.server.registry.hub.conftest import BIG, Hub, enlarge, publish
from tests.server.registry.hub.relay import relayed
from tests.server.registry.hub.stock import Refused

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def outside(s3):
    """The bucket as clients reach it."""
    with relayed(s3.url) as relay:
        yield relay


@pytest.fixture(scope="module")
def hub(home_template, tmp_path_factory, s3, outside):
    root = tmp_path_factory.mktemp("hub") / "server"
    changes = s3.settings() | {
        "delivery": Delivery.REDIRECT,
        "storage_public_endpoint": outside.url,
    }
    settings = Settings(**(copy_home(home_template, root, None).model_dump() | changes))
    open_artifacts(settings).put((root / "source" / "tokenizer.json").read_bytes())
    with home_of(settings, root / "source") as home, running(home, "--workers", "0") as run:
        fleet = Fleet(home, run[1])
        versions = {"big": [publish(fleet, fleet.app(), fleet.device(), "big")]}
        yield Hub(fleet, run[1], home.token("app"), versions)
        fleet.close()


@pytest.fixture(scope="module")
def big(hub):
    return enlarge(hub.home, "default", "big")


def test_a_download_breaks_off_at_the_bucket_and_goes_on_there(version, client, at, hub, relay, outside, big, tmp_path):
    outside.take()
    outside.break_after = 15 << 20

    def fetch():
        return client("snapshot_download", "default/big", cache_dir=str(tmp_path), max_workers=1, **at)

    if version == 0:
        with pytest.raises(Refused):
            fetch()
    path = Path(fetch())
    assert (path / WEIGHTS).read_bytes() == big
    assert path.name == hub.versions["big"][0]["revision"]
    whole, rest = (
        exchange for exchange in outside.take() if exchange.method == "GET" and exchange.body_bytes > 10 << 20
    )
    assert (whole.status, whole.body_bytes) == (200, 15 << 20)
    assert (rest.status, rest.headers["range"], rest.body_bytes) == (206, f"bytes={10 << 20}-", BIG - (10 << 20))
    # The address is the right to the file: the token stays with the server.
    assert "authorization" not in whole.headers
    assert "authorization" not in rest.headers
    exchanges = [exchange for exchange in relay.exchanges if exchange.path.endswith(WEIGHTS)]
    assert {(exchange.method, exchange.status) for exchange in exchanges} == {("HEAD", 200), ("GET", 307)}
    for exchange in exchanges:
        assert exchange.answer_headers["x-repo-commit"] == path.name
        assert exchange.answer_headers["x-linked-size"] == str(BIG)
        assert exchange.answer_headers["x-linked-etag"] == f'"{(path / WEIGHTS).resolve().name}"'
    # Small ones come from the server itself.
    assert {
        exchange.status
        for exchange in relay.exchanges
        if exchange.method == "GET" and exchange.path.endswith("config.json")
    } == {200}
    relay.take()
    assert client("snapshot_download", "default/big", cache_dir=str(tmp_path), **at) == str(path)
    assert outside.take() == []
