"""The commands about the machine that runs the agent: `doctor` and `install-service`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from device_agent.cli.options import AdbOption, DataOption, HomeOption, JsonOption, RulesOption
from device_agent.cli.run import ExecutorOption, parse_datasets
from device_agent.daemon.service import Service, owner_of
from device_agent.home import AgentHome
from shared.errors import MobizoError

app = typer.Typer(pretty_exceptions_enable=False)


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
