"""A server in a process of its own, with adapters of two tenants, and the stock clients that read them."""

import secrets
from dataclasses import dataclass

import pytest

from server.registry.models import StoredPeftFile
from server.registry.repository import resolve
from server.storage.store import hold
from tests.server.actors import Fleet
from tests.server.homes import copy_home, home_of
from tests.server.operations.test_serving import running
from tests.server.registry.hub.relay import relayed
from tests.server.registry.hub.stock import Missing, stock_client

BIG = 24 << 20  # clients write a download in pieces of 10 MiB, and go on behind the last whole one


@dataclass
class Hub:
    """A server with adapters, its home, and a token that may read those of tenant `default`."""

    fleet: Fleet
    url: str
    token: str
    versions: dict  # answers to the completions, by adapter

    @property
    def home(self):
        return self.fleet.home


def publish(fleet, app, device, adapter, value=0.5, **changes):
    """One more version of an adapter."""
    fleet.ready_job(app, adapter=adapter)
    return device.finish(device.lease(), value, **changes)


def enlarge(home, tenant, name):
    """Gives an adapter's latest version weights that take a while to fetch; what they are."""
    data = secrets.token_bytes(BIG)
    sha256 = home.artifacts.put(data)
    with home.database.writing() as session:
        _, version = resolve(session, tenant, name, "main")
        hold(session, home.artifacts, [sha256])
        session.add(
            StoredPeftFile(version_number=version.number, path="adapter_model.safetensors", size=BIG, sha256=sha256)
        )
    return data


def fill(fleet):
    """The adapters of the tests: what each completion was answered."""
    app, device = fleet.app(), fleet.device()
    versions = {
        "alice-movies": [
            publish(fleet, app, device, "alice-movies", 0.5),
            publish(fleet, app, device, "alice-movies", 0.25),
        ],
        "bob": [publish(fleet, app, device, "bob", 0.125)],
        "worse": [publish(fleet, app, device, "worse", tuned_accuracy=0.25)],
        "big": [publish(fleet, app, device, "big")],
    }
    stranger, foreign_device = fleet.app("other"), fleet.device("other")
    versions["secret"] = [publish(fleet, stranger, foreign_device, "secret")]
    return versions


@pytest.fixture(scope="module")
def hub(home_template, tmp_path_factory):
    root = tmp_path_factory.mktemp("hub") / "server"
    with home_of(copy_home(home_template, root, None), root / "source") as home, running(home, "--workers", "0") as run:
        fleet = Fleet(home, run[1])
        versions = fill(fleet)
        yield Hub(fleet, run[1], home.token("app"), versions)
        fleet.close()


@pytest.fixture(scope="module")
def big(hub):
    return enlarge(hub.home, "default", "big")


@pytest.fixture(scope="module", params=[pytest.param(0, id="0.36", marks=pytest.mark.slow), pytest.param(2, id="2")])
def version(request):
    """The client's major version."""
    return request.param


@pytest.fixture(scope="module")
def client(version, tmp_path_factory):
    """The stock client, told of no server."""
    try:
        with stock_client(version, tmp_path_factory.mktemp("cache")) as stock:
            yield stock
    except Missing as error:
        pytest.skip(str(error))


@pytest.fixture
def relay(hub):
    with relayed(hub.url) as new_relay:
        yield new_relay


@pytest.fixture
def at(relay, hub):
    """What calls are told of the server."""
    return {"endpoint": relay.url, "token": hub.token}
