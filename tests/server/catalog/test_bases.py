"""The base models of a server, as its API and its clients show them."""

import json

from typer.testing import CliRunner

from mobizo.cli import app as cli
from tests.server.homes import SHAPE


def test_base_models_are_listed_by_client_and_command(fleet, app, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    (row,) = json.loads(CliRunner().invoke(cli, ["base", "list", "--json"]).stdout)
    assert row == app.get("/v1/bases").json()[0]
    assert (row["name"], row["hub_id"], row["parameters"]) == ("tiny", "acme/tiny", 1000)
    assert (row["layers"], row["context_length"]) == (SHAPE.layers, SHAPE.context_length)
    assert row["precisions"] == ["fp32", "int8", "int4", "int8-weight"]
    assert row["chat_template"] is False
    assert "acme/tiny" in CliRunner().invoke(cli, ["base", "list"]).stdout
