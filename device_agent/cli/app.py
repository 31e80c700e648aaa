"""The whole `mobizo-agent` command: `enroll` and all sub-applications."""

from __future__ import annotations

from typing import Annotated

import typer

from device_agent.cli import adapters as adapters_cli
from device_agent.cli import data as data_cli
from device_agent.cli import inference as inference_cli
from device_agent.cli import machine as machine_cli
from device_agent.cli import run as run_cli
from device_agent.cli import serve as serve_cli
from device_agent.cli import tasks as tasks_cli
from device_agent.cli.main import new_app
from device_agent.cli.options import HomeOption, JsonOption, check_name, show
from device_agent.home import AgentHome, DeviceConfig
from device_agent.protocol.client import DeviceClient
from shared.signing import key_id, parse_public, public_text

app = new_app()


@app.command()
def enroll(
    server: Annotated[str, typer.Option(help="The server's URL.")],
    name: Annotated[str, typer.Option(help="This device's name.")],
    token: Annotated[str, typer.Option(help="One-time token from the operator.")],
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Enroll this device at a server with a one-time token, and pin the server's public key."""
    agent_home = AgentHome.locate(home)
    check_name("--name", name)
    agent_home.create()
    with DeviceClient(server, token) as client:
        grant = client.enroll(name, public_text(agent_home.device_key().public_key()))
    pinned = key_id(parse_public(grant.server.public_key))
    agent_home.enroll(
        DeviceConfig(
            server=server,
            name=name,
            device_id=grant.device_id,
            token=grant.token,
            public_key=grant.server.public_key,
            key_id=pinned,
        )
    )
    facts = {"device_id": grant.device_id, "server": server, "key_id": pinned}
    show(json_lines, facts, f"enrolled as {name} ({grant.device_id}); programs must be signed by key {pinned}")


app.add_typer(run_cli.app)
app.add_typer(machine_cli.app)
app.add_typer(inference_cli.app)
app.add_typer(serve_cli.app)
app.add_typer(adapters_cli.app, name="adapter")
app.add_typer(tasks_cli.app, name="task")
app.add_typer(data_cli.app, name="data")
