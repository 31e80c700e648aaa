"""The commands that control the daemon: `run`, `status`, `round list`, `pause`, `resume`, `stop`, `logs`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from device_agent.android.adb import Adb
from device_agent.cli.options import AdbOption, DataOption, HomeOption, JsonOption, RulesOption, check_name, show
from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display, LogFile, Watchdog, configure_logs, log_path, readable, tail
from device_agent.datasets.store import check_directory
from device_agent.executors.choice import ExecutorName, LauncherSelector
from device_agent.home import PAUSED, AgentHome, DaemonStatus
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.rounds import past_rounds
from device_agent.policy.evaluator import load_rules
from device_agent.policy.phone_sensors import AdbSensors
from device_agent.policy.privacy_ledger import PrivacyLedger
from device_agent.policy.sensors import LinuxSensors, PhoneWithHost
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from shared.errors import BadRequest, MobizoError

STOP_SECONDS = 60.0  # `stop` waits this long for the current step
POLL_SECONDS = 0.1

app = typer.Typer(pretty_exceptions_enable=False)
rounds = typer.Typer(help="Federated rounds that this device took part in.", no_args_is_help=True)
app.add_typer(rounds, name="round")


ExecutorOption = Annotated[
    ExecutorName | None, typer.Option("--executor", help="What runs programs. Default: the native runner if installed.")
]


def _enrolled(home: Path | None) -> AgentHome:
    """Returns the agent's home. Raises NotEnrolled."""
    agent_home = AgentHome.locate(home)
    agent_home.config()
    return agent_home


@app.command()
def run(
    data: DataOption = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after one job, or if no job is waiting.")] = False,
    executor: ExecutorOption = None,
    adb: AdbOption = None,
    rules: RulesOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Lease jobs and train them until stopped (Ctrl-C or SIGTERM); an unfinished run resumes at the next start."""
    directories, agent_home = parse_datasets(data or []), _enrolled(home)
    agent_home.create()
    if adb is not None and executor is not None:
        raise BadRequest(f"--adb trains on a phone, but --executor {executor} does not")
    phone = None if adb is None else Adb(adb or None)  # "": the only phone
    launchers = LauncherSelector(executor, phone)
    configure_logs(json_lines, LogFile(log_path(agent_home.path)))
    # A phone's own network is not used.
    sensors = None if phone is None else PhoneWithHost(AdbSensors(phone.separate().run), LinuxSensors())
    watchdog = Watchdog()
    with agent_home.lock(), Display(agent_home) as display:
        daemon = Daemon(
            agent_home,
            directories,
            display,
            launchers=launchers,
            sensors=sensors,
            watchdog=watchdog,
            rules=rules,
            capabilities=launchers.capabilities,
        )

        def end(_number: int, _frame: FrameType | None) -> None:
            watchdog.notify("STOPPING=1")
            daemon.stop()

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        watchdog.notify("READY=1")
        ended = daemon.run(once)
    if ended is None:
        typer.echo("no job is waiting for this device", err=True)
    elif ended.outcome not in (Outcome.COMPLETED, Outcome.INTERRUPTED):
        raise MobizoError(f"the job was {ended.outcome}" + (f": {ended.detail}" if ended.detail else ""))


@app.command()
def status(rules: RulesOption = None, home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Show what the agent is doing, why if it is not training, and the privacy spent on each data set."""
    agent_home = AgentHome.locate(home)
    config, running = agent_home.config(), agent_home.running()
    daemon_status = agent_home.status()
    state = daemon_status.state if daemon_status is not None and running else "stopped"
    paused = agent_home.paused.exists()
    _, consents = load_rules(rules or agent_home.rules)
    spendings = PrivacyLedger(agent_home.privacy, consents).summary()
    waiting = sum(entry.state is TaskState.WAITING for entry in TaskApprovals(agent_home.tasks).decisions())
    facts = {"server": config.server, "name": config.name, "device_id": config.device_id}
    details = daemon_status.model_dump(mode="json") if daemon_status is not None else {}
    own = {"privacy": [spending.model_dump() for spending in spendings], "tasks_waiting": waiting}
    facts |= details | {"running": running, "paused": paused, "state": state} | own
    lines = [f"{config.name} ({config.device_id}) at {config.server}: {state}"]
    lines += _status_lines(daemon_status or DaemonStatus(), running, paused)
    if waiting:
        lines.append(f"tasks that wait for your decision: {waiting}; see `mobizo-agent task list`")
    show(json_lines, facts, "\n".join(lines + [spending.line() for spending in spendings]))


def _status_lines(daemon_status: DaemonStatus, running: bool, paused: bool) -> list[str]:
    """Returns the lines that describe a status."""
    lines = []
    if not running:
        lines.append("no agent runs in this home; start one with `mobizo-agent run`")
    elif daemon_status.job_id is not None:
        progress = daemon_status.progress.line() if daemon_status.progress is not None else "starting"
        part = "" if daemon_status.round is None else f"{daemon_status.round.label}, "
        lines.append(f"{part}job {daemon_status.job_id} for adapter {daemon_status.adapter}: {progress}")
    elif daemon_status.why is not None:
        lines.append(f"not training: {daemon_status.why}")
    elif daemon_status.state == "idle":
        lines.append("not training: the server has no job for this device")
    if paused and PAUSED not in " ".join(lines):
        lines.append("paused by the user from the next check of the rules on; continue with `mobizo-agent resume`")
    if daemon_status.unknown:
        lines.append(
            f"rules without a sensor on this device, which are not enforced: {', '.join(daemon_status.unknown)}"
        )
    if daemon_status.last_job_id is not None:
        detail = f": {daemon_status.last_detail}" if daemon_status.last_detail else ""
        lines.append(f"last job {daemon_status.last_job_id} {daemon_status.last_outcome}{detail}")
    return lines


@rounds.command("list")
def list_rounds(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """List the federated rounds that this device took part in: its uploads and its locally measured accuracy."""
    agent_home = AgentHome.locate(home)
    records = past_rounds(agent_home.rounds)
    for record in records:
        typer.echo(record.model_dump_json() if json_lines else record.line())
    if not records and not json_lines:
        typer.echo("none yet; `cohorts` in rules.toml lists the cohorts whose rounds this device may join")


@app.command()
def pause(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Pause training until `resume`, even across restarts; the current run is kept."""
    agent_home = _enrolled(home)
    agent_home.paused.touch(0o600)
    running = agent_home.running()
    text = "paused; " + ("the agent waits after the current step" if running else "no agent is running")
    show(json_lines, {"paused": True, "running": running}, text)


@app.command()
def resume(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Resume training after `pause`."""
    agent_home = _enrolled(home)
    agent_home.paused.unlink(missing_ok=True)
    running = agent_home.running()
    text = "resumed" if running else "resumed; no agent is running, start one with `mobizo-agent run`"
    show(json_lines, {"paused": False, "running": running}, text)


@app.command()
def stop(home: HomeOption = None, json_lines: JsonOption = False) -> None:
    """Stop the agent after the current step; its run resumes at the next start."""
    agent_home = _enrolled(home)
    agent_home.stop_daemon()
    deadline = time.monotonic() + STOP_SECONDS
    while agent_home.running():
        if time.monotonic() > deadline:
            raise MobizoError(f"the agent has not stopped within {STOP_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    show(json_lines, {"running": False}, "stopped")


@app.command()
def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=1_000_000, help="Number of lines from the end.")
    ] = 50,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Print the agent's log, whether or not the agent runs."""
    for line in tail(log_path(AgentHome.locate(home).path), lines):
        typer.echo(line if json_lines else readable(line))


def parse_datasets(options: list[str]) -> dict[str, Path]:
    """Returns the directory of each data set by name, parsed from NAME=DIR. Raises BadRequest or InvalidDataset."""
    datasets: dict[str, Path] = {}
    for option in options:
        name, equals, directory = option.partition("=")
        if not equals or not directory:
            raise BadRequest(f"--data {option!r} must be NAME=DIR")
        check_name("--data NAME=DIR: NAME", name)
        if name in datasets:
            raise BadRequest(f"--data names {name!r} twice")
        path = Path(directory).expanduser().resolve()
        check_directory(path)
        datasets[name] = path
    return datasets
