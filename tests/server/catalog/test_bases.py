"""The base models of a server, as its API and its clients show them."""

import json

from typer.testing import CliRunner

from mobizo.cli import app as cli
from tests.server.conftest import SHAPE


def test_base_models_are_listed_by_client_and_command(fleet, app, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    (found,) = json.loads(CliRunner().invoke(cli, ["base", "list", "--json"]).stdout)
    assert found == app.get("/v1/bases").json()[0]
    assert (found["name"], found["hub_id"], found["parameters"]) == ("tiny", "acme/tiny", 1000)
    assert (found["layers"], found["context_length"]) == (SHAPE.layers, SHAPE.context_length)
    assert found["precisions"] == ["fp32", "int8", "int4", "int8-weight"]
    assert found["chat_template"] is False
    assert "acme/tiny" in CliRunner().invoke(cli, ["base", "list"]).stdout
    shown = CliRunner().invoke(cli, ["base", "view", "tiny", "--json"])
    assert json.loads(shown.stdout) == found
    assert "`mobizo base list`" in CliRunner().invoke(cli, ["base", "view", "none"]).stderr
