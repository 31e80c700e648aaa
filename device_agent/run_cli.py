"""The commands of the daemon's life: `run`, `train`, `status`, `rounds`, `pause`, `resume`, `stop`, `logs`.

Knows no rule.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from device_agent.adb import Adb
from device_agent.assignment import Ended, Outcome
from device_agent.control import Answer, ControlServer, Handler, Pause, Question, ask
from device_agent.daemon import Daemon
from device_agent.datasets import check_directory
from device_agent.display import Display, configure_logs
from device_agent.engines.choice import EngineChoice, EngineName
from device_agent.logs import LogFile, follow, log_path, readable, tail
from device_agent.options import AdbOption, DataOption, HomeOption, JsonOption, RulesOption
from device_agent.rounds import RoundLog
from device_agent.sensors import PhoneBehind, Sensors
from device_agent.sensors_adb import AdbSensors
from device_agent.sensors_linux import LinuxSensors
from device_agent.state import Home, Status
from device_agent.watchdog import Watchdog
from shared.errors import BadRequest, MobizoError
from shared.job import NAME

STOP_SECONDS = 60.0  # that `stop` waits for the step in progress
POLL_SECONDS = 0.1

app = typer.Typer(pretty_exceptions_enable=False)


EngineOption = Annotated[
    EngineName | None, typer.Option("--engine", help="what trains; else the native runner where it can be had")
]


@app.command()
def run(
    data: DataOption,
    once: Annotated[bool, typer.Option("--once", help="exit after one job, or when none is waiting")] = False,
    engine: EngineOption = None,
    adb: AdbOption = None,
    rules: RulesOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Lease jobs and train them until stopped (Ctrl-C or SIGTERM); a stopped run goes on at the next start."""
    _work(Home.locate(home), data, once, json_lines, engine, adb, rules)


@app.command()
def train(
    data: DataOption,
    once: Annotated[bool, typer.Option("--once", help="required: train one job, then exit")] = False,
    engine: EngineOption = None,
    adb: AdbOption = None,
    rules: RulesOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Train the job that is waiting for this device, then exit: status 1 if it failed."""
    if not once:
        raise BadRequest("`train` needs --once; `run` is the command that keeps training")
    _work(Home.locate(home), data, True, json_lines, engine, adb, rules)


@app.command()
def status(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show what the agent of this home does and, if it does not train, why."""
    place = Home.locate(home)
    config, running = place.config(), place.running()
    try:
        shown = ask(place.control, Question(ask="status")).status if running else place.status()
    except MobizoError:
        shown = place.status()  # the daemon begins or ends just now
    state = shown.state if shown is not None and running else "stopped"
    paused = bool(Pause(place.path))
    if json_lines:
        facts = {"server": config.server, "name": config.name, "device_id": config.device_id}
        seen = shown.model_dump(mode="json") if shown is not None else {}
        typer.echo(json.dumps(facts | seen | {"running": running, "paused": paused, "state": state}))
        return
    typer.echo(f"{config.name} ({config.device_id}) at {config.server}: {state}")
    for line in _words(shown or Status(), running, paused):
        typer.echo(line)


def _words(shown: Status, running: bool, paused: bool) -> list[str]:
    """What there is to say of a status, a line each."""
    lines = []
    if not running:
        lines.append("no agent runs in this home; `mobizo-agent run` starts one")
    elif shown.job_id is not None:
        progress = shown.progress.line() if shown.progress is not None else "starting"
        part = "" if shown.round is None else f"{shown.round.words}, "
        lines.append(f"{part}job {shown.job_id} for adapter {shown.adapter}: {progress}")
    elif shown.why is not None:
        lines.append(f"it does not train: {shown.why}")
    elif shown.state == "idle":
        lines.append("it does not train: the server has no job for this device")
    if paused and "a person" not in " ".join(lines):
        lines.append("paused by a person, from its next look at the rules on; `mobizo-agent resume` goes on")
    if shown.unknown:
        lines.append(f"rules that no sensor here can answer, so they are not held: {', '.join(shown.unknown)}")
    if shown.clock_skew_seconds is not None:
        ahead = "ahead of" if shown.clock_skew_seconds > 0 else "behind"
        lines.append(f"this device's clock is {abs(shown.clock_skew_seconds):.0f} s {ahead} the server's")
    if shown.last_job_id is not None:
        why = f": {shown.last_detail}" if shown.last_detail else ""
        lines.append(f"last job {shown.last_job_id} {shown.last_outcome}{why}")
    return lines


@app.command()
def rounds(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show the rounds of cohorts that this device took part in: what it sent, and what it measured on its own data."""
    place = Home.locate(home)
    past = RoundLog(place.rounds).past()
    for found in past:
        typer.echo(found.model_dump_json() if json_lines else found.line())
    if not past and not json_lines:
        typer.echo("none yet; `cohorts` in rules.toml says whose rounds this device may take part in")


@app.command()
def pause(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Not now: training waits until `resume`, also over restarts; a run in progress is kept."""
    place = Home.locate(home)
    place.config()
    Pause(place.path).begin()
    running = place.running()
    if json_lines:
        typer.echo(json.dumps({"paused": True, "running": running}))
    else:
        typer.echo("paused; " + ("the step in progress ends, then it waits" if running else "no agent runs just now"))


@app.command()
def resume(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Let a paused agent train again."""
    place = Home.locate(home)
    place.config()
    Pause(place.path).end()
    running = place.running()
    if json_lines:
        typer.echo(json.dumps({"paused": False, "running": running}))
    else:
        typer.echo("resumed" if running else "resumed; no agent runs just now, `mobizo-agent run` starts one")


@app.command()
def stop(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Stop the agent of this home after the step in progress; its run goes on at the next start."""
    place = Home.locate(home)
    place.config()
    ask(place.control, Question(ask="stop"))
    deadline = time.monotonic() + STOP_SECONDS
    while place.running():
        if time.monotonic() > deadline:
            raise MobizoError(f"the agent was told to stop, but still works after {STOP_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    typer.echo(json.dumps({"running": False}) if json_lines else "stopped")


@app.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=1_000_000, help="from the end")] = 50,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="go on with lines as they come (Ctrl-C ends)")
    ] = False,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Show the agent's log, whether or not it runs."""
    path = log_path(Home.locate(home).path)
    coming = follow(path) if following else iter(())
    for line in tail(path, lines):
        typer.echo(line if json_lines else readable(line))
    try:
        for line in coming:
            typer.echo(line if json_lines else readable(line))
    except KeyboardInterrupt:
        return


def parse_datasets(options: list[str]) -> dict[str, Path]:
    """The directory of each data set by name, from NAME=DIR. Raises BadRequest or InvalidDataset."""
    datasets: dict[str, Path] = {}
    for option in options:
        name, equals, directory = option.partition("=")
        if not equals or not re.fullmatch(NAME, name) or not directory:
            raise BadRequest(f"--data {option!r} must be NAME=DIR; NAME is lower-case letters, digits, '.', '_' or '-'")
        if name in datasets:
            raise BadRequest(f"--data names {name!r} twice")
        path = Path(directory).expanduser().resolve()
        check_directory(path)
        datasets[name] = path
    return datasets


def _engines(home: Home, engine: EngineName | None, serial: str | None) -> EngineChoice:
    """What trains programs: --adb alone means its engine."""
    if serial is not None and engine not in (None, EngineName.ADB):
        raise BadRequest(f"--adb trains on a phone; --engine {engine} does not")
    on_phone = serial is not None or engine is EngineName.ADB
    return EngineChoice(home, engine, Adb(serial or None) if on_phone else None)


def _sensors(phone: Adb | None) -> Sensors | None:
    """The phone's own, but for the network, which is this machine's; None for this machine's."""
    if phone is None:
        return None
    return PhoneBehind(AdbSensors(phone.apart().say), LinuxSensors())


def _work(
    home: Home,
    data: list[str],
    once: bool,
    json_lines: bool,
    engine: EngineName | None,
    serial: str | None,
    rules: Path | None,
) -> None:
    datasets = parse_datasets(data)
    home.config()
    home.create()
    engines = _engines(home, engine, serial)
    configure_logs(json_lines, LogFile(log_path(home.path)))
    live = sys.stderr.isatty() and not json_lines
    watchdog = Watchdog()
    with home.lock(), Display(home, live) as display, ControlServer(home.control, answers(home)):
        daemon = Daemon(
            home,
            datasets,
            display,
            engines=engines,
            sensors=_sensors(engines.phone),
            watchdog=watchdog,
            rules=rules,
            capabilities=engines.capabilities,
        )

        def end(_number: int, _frame: FrameType | None) -> None:
            watchdog.stopping()
            daemon.stop()

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        watchdog.ready()
        ended = daemon.run(once)
    _leave(ended)


def answers(home: Home) -> Handler:
    """What the daemon of a home answers on its control socket."""
    paused = Pause(home.path)

    def answer(question: Question) -> Answer:
        if question.ask == "pause":
            paused.begin()
        elif question.ask == "resume":
            paused.end()
        elif question.ask == "stop":
            # To the whole process: its signal handler can end a wait in the main thread, and this thread cannot.
            os.kill(os.getpid(), signal.SIGTERM)
        lines = tuple(tail(log_path(home.path), question.lines)) if question.ask == "logs" else ()
        return Answer(paused=bool(paused), status=home.status(), lines=lines)

    return answer


def _leave(ended: Ended | None) -> None:
    if ended is None:
        typer.echo("no job is waiting for this device", err=True)
    elif ended.outcome not in (Outcome.COMPLETED, Outcome.INTERRUPTED):
        raise MobizoError(f"the job was {ended.outcome}" + (f": {ended.detail}" if ended.detail else ""))
