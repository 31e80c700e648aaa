"""The whole `mobizo-agent` command: `enroll` and all sub-applications."""

from __future__ import annotations

import re
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
from device_agent.cli.options import HomeOption, JsonOption, show
from device_agent.home import AgentHome, DeviceConfig
from device_agent.protocol.client import DeviceClient
from device_agent.protocol.enrollment import request_enrollment
from shared.errors import BadRequest
from shared.job import NAME
from shared.protocol import DeviceAuthorization, DeviceGrant
from shared.signing import fingerprint, key_id, new_private_key, parse_public, public_text
from shared.transport import Transport

app = new_app()


@app.command()
def enroll(
    server: Annotated[str, typer.Option(help="the server's URL")],
    name: Annotated[str, typer.Option(help="this device's name")],
    token: Annotated[
        str | None,
        typer.Option(help="one-time token from the operator; default: show a code for an operator to approve"),
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Enroll this device at a server, with a one-time token or a code that an operator approves, and pin the server's
    public key.
    """
    agent_home = AgentHome.locate(home)
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"--name {name!r} must be lower-case letters, digits, '.', '_' or '-'")
    agent_home.create()
    if token is not None:
        with DeviceClient(server, token) as client:
            grant = client.enroll(name, public_text(agent_home.device_key().public_key()))
    else:
        grant = _request_approval(agent_home, server, name, json_lines)
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


def _request_approval(agent_home: AgentHome, server: str, name: str, json_lines: bool) -> DeviceGrant:
    """Shows a code and waits for an operator's approval. Stores the device's key if it is approved."""
    key = agent_home.stored_device_key() or new_private_key()
    public = public_text(key.public_key())

    def show_code(authorization: DeviceAuthorization) -> None:
        facts: dict[str, object] = {
            "user_code": authorization.user_code,
            "verification_uri": authorization.verification_uri,
        }
        text = f"""Code:        {authorization.user_code}
Fingerprint: {fingerprint(public)}
Ask an operator to run: mobizo device approve {authorization.user_code} --server {server}
(or to open {authorization.verification_uri_complete or authorization.verification_uri})
Waiting for at most {authorization.expires_in // 60} minutes; press Ctrl-C to cancel."""
        facts |= {"fingerprint": fingerprint(public), "expires_in": authorization.expires_in}
        show(json_lines, facts, text)

    with Transport(server) as transport:
        grant = request_enrollment(transport, name, public, show_code)
    agent_home.store_device_key(key)
    return grant


app.add_typer(run_cli.app)
app.add_typer(machine_cli.app)
app.add_typer(inference_cli.app)
app.add_typer(serve_cli.app)
app.add_typer(adapters_cli.app, name="adapter")
app.add_typer(tasks_cli.app, name="task")
app.add_typer(data_cli.app, name="data")
