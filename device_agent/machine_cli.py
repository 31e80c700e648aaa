"""The commands about the machine that the agent lives on: `doctor`, `install-service`, `build-runner`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from device_agent.options import AdbOption, DataOption, HomeOption, JsonOption, RulesOption
from device_agent.run_cli import EngineOption, parse_datasets
from device_agent.runner_supply import build_runner_command
from device_agent.service import Service, owner_of
from device_agent.state import Home
from shared.errors import MobizoError

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def doctor(adb: AdbOption = None, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Look at all that a working agent needs, one line each; status 1 if anything fails."""
    # The daemon, which this same command starts, has no need of it.
    from device_agent.doctor import examine

    failed = []
    for check in examine(Home.locate(home), adb):
        typer.echo(json.dumps(asdict(check)) if json_lines else check.line())
        if check.state == "fail":
            failed.append(check.name)
    if failed:
        raise MobizoError(f"failed: {', '.join(failed)}")


@app.command("install-service")
def install_service(
    data: DataOption,
    user: Annotated[
        bool, typer.Option("--user", help="of this user's own systemd: needs no root, protects less")
    ] = False,
    account: Annotated[
        str | None, typer.Option("--as", metavar="USER", help="whom the system's unit runs as; else the home's owner")
    ] = None,
    printed: Annotated[bool, typer.Option("--print", help="show the unit, write nothing")] = False,
    engine: EngineOption = None,
    adb: AdbOption = None,
    rules: RulesOption = None,
    home: HomeOption = None,
) -> None:
    """Write the systemd unit that runs the agent with these options from every start of the machine on."""
    place = Home.locate(home)
    command = [sys.executable, "-m", "device_agent", "run"]
    for name, directory in parse_datasets(data).items():
        command += ["--data", f"{name}={directory}"]
    if engine is not None:
        command += ["--engine", engine.value]
    if adb is not None:
        command += [f"--adb={adb}"]
    if rules is not None:
        command += ["--rules", str(rules.resolve())]
    path = place.path.resolve()
    service = Service(command, path, account or owner_of(path), user)
    if printed:
        typer.echo(service.text(), nl=False)
        return
    place.config()
    service.install()
    typer.echo(f"{service.path} is written; start it with: {service.start_hint}")


@app.command("build-runner")
def build_runner(
    executorch_root: Annotated[
        Path | None, typer.Option(help="an ExecuTorch to build against; else the installed package's, or a fetched one")
    ] = None,
    toolchain: Annotated[Path | None, typer.Option(help="CMake's toolchain file, for another platform")] = None,
    platform: Annotated[str | None, typer.Option(help="that other platform, such as android-arm64")] = None,
    archive: Annotated[
        Path | None, typer.Option(help="also pack it into this .tar.gz, for `mobizo-server runners add`")
    ] = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Build the native runner, with which this device trains without torch."""
    place = Home.locate(home)
    place.create()
    build_runner_command(place.path, executorch_root, toolchain, platform, archive, json_lines)
