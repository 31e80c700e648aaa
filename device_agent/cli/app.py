"""The whole `mobizo-agent` command: `enroll`, `doctor`, `install-service` and all sub-applications."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from device_agent.cli import adapters as adapters_cli
from device_agent.cli import data as data_cli
from device_agent.cli import inference as inference_cli
from device_agent.cli import run as run_cli
from device_agent.cli import serve as serve_cli
from device_agent.cli import tasks as tasks_cli
from device_agent.cli.main import new_app
from device_agent.cli.options import AdbOption, DataOption, HomeOption, JsonOption, RulesOption, check_name, show
from device_agent.cli.run import ExecutorOption, parse_datasets
from device_agent.daemon.service import Service, owner_of
from device_agent.home import AgentHome, DeviceConfig
from device_agent.protocol.client import DeviceClient
from shared.errors import MobizoError
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


@app.command()
def doctor(adb: AdbOption = None, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Check everything that a working agent needs, one line per check; exit status 1 if a check fails."""
    # Imported here to keep the daemon's memory small.
    from device_agent.daemon.doctor import examine

    failed = []
    for check in examine(AgentHome.locate(home), adb):
        typer.echo(json.dumps(asdict(check)) if json_lines else check.line())
        if check.state == "fail":
            failed.append(check.name)
    if failed:
        raise MobizoError(f"failed: {', '.join(failed)}")


@app.command("install-service")
def install_service(
    data: DataOption = None,
    user: Annotated[
        bool, typer.Option("--user", help="Install for this user's systemd: needs no root, but isolates less.")
    ] = False,
    printed: Annotated[bool, typer.Option("--print", help="Print the unit without installing it.")] = False,
    executor: ExecutorOption = None,
    adb: AdbOption = None,
    rules: RulesOption = None,
    home: HomeOption = None,
) -> None:
    """Write the systemd unit that starts the agent with these options at boot, as the user that owns the home."""
    agent_home = AgentHome.locate(home)
    command = [sys.executable, "-m", "device_agent", "run"]
    for name, directory in parse_datasets(data or []).items():
        command += ["--data", f"{name}={directory}"]
    if executor is not None:
        command += ["--executor", executor.value]
    if adb is not None:
        command += [f"--adb={adb}"]
    if rules is not None:
        command += ["--rules", str(rules.resolve())]
    path = agent_home.path.resolve()
    service = Service(command, path, owner_of(path), user)
    if printed:
        typer.echo(service.text(), nl=False)
        return
    agent_home.config()
    service.install()
    typer.echo(f"{service.path} was written; start it with: {service.start_hint}")


app.add_typer(run_cli.app)
app.add_typer(inference_cli.app)
app.add_typer(serve_cli.app)
app.add_typer(adapters_cli.app, name="adapter")
app.add_typer(tasks_cli.app, name="task")
app.add_typer(data_cli.app, name="data")
