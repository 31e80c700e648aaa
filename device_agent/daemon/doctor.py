"""`mobizo-agent doctor`: checks the installation without changing it; each check yields one line with a remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from device_agent.android.adb import Adb
from device_agent.daemon.service import installed_units
from device_agent.errors import NoRunner
from device_agent.executors.choice import has_python_runtime
from device_agent.home import AgentHome, DeviceConfig
from device_agent.memory import spare_bytes
from device_agent.policy.evaluator import load_rules
from device_agent.policy.rules import decide
from device_agent.policy.sensors import LinuxSensors, Sensors
from device_agent.programs import MARGIN_BYTES
from device_agent.protocol.client import ServerClock
from device_agent.runner.location import find_runner
from shared.checkup import Check, State
from shared.errors import Forbidden, MobizoError, NotFound, Unauthorized
from shared.key_rotation import ServerKeys, follow
from shared.protocol import ServerInfo
from shared.rules import Rules
from shared.transport import Transport

ANSWER_SECONDS = 5.0  # timeout for the server
SKEW_SECONDS = 60.0
MIN_DISK, MIN_MEMORY = 2 * 10**9, 10**9  # bytes; a small model and its run fit above


def examine(home: AgentHome, adb: str | None = None, sensors: Sensors | None = None) -> Iterator[Check]:
    """Yields every check. adb: serial number of the phone to check, "" for the only one, None for no phone."""
    yield check_home(home)
    enrolled, config = check_enrollment(home)
    yield enrolled
    if config is not None:
        yield from check_server(config)
    yield check_disk(home)
    yield check_memory()
    yield check_engine()
    if adb is not None:
        yield check_phone(adb)
    rules_check, rules = check_rules(home)
    yield rules_check
    yield check_sensors(rules, LinuxSensors() if sensors is None else sensors)
    yield check_service()
    yield check_daemon(home)


def check_home(home: AgentHome) -> Check:
    """Checks that the home exists and that its secrets are readable by this user only."""
    if not home.path.is_dir():
        return Check("home", "fail", f"{home.path} does not exist", "`mobizo-agent enroll` creates it")
    secret = (home.path, home.path / "config.json", home.path / "device.key")
    for path in (path for path in secret if path.exists()):
        stat = path.stat()
        if stat.st_uid != os.geteuid():
            return Check("home", "fail", f"{path} belongs to another user", f"run as that user, or `chown` {home.path}")
        if stat.st_mode & 0o077:
            mode = "700" if path.is_dir() else "600"
            return Check("home", "fail", f"other users can read {path}", f"`chmod {mode} {path}`")
    return Check("home", "ok", f"{home.path}, readable by this user only")


def check_enrollment(home: AgentHome) -> tuple[Check, DeviceConfig | None]:
    """Checks that this device is enrolled."""
    try:
        config = home.config()
    except MobizoError as error:
        return Check("enrolled", "fail", error.detail), None
    return Check("enrolled", "ok", f"as {config.name} ({config.device_id}) at {config.server}"), config


def check_server(config: DeviceConfig) -> Iterator[Check]:
    """Checks that the server answers, signs with the pinned key, accepts this device and agrees on the time."""
    clock = ServerClock()
    with Transport(config.server, config.token, timeout=ANSWER_SECONDS, attempts=1) as transport:
        try:
            answer = transport.request("GET", "/v1/server")
            clock.observe(answer.headers.get("Date"))
            info = ServerInfo.model_validate_json(answer.content)
        except MobizoError as error:
            yield Check("server", "fail", error.detail, "check its address, whether it runs, and this device's network")
            return
        except ValueError:
            yield Check("server", "fail", f"{config.server} does not answer as a mobizo server", "check its address")
            return
        if info.public_key != config.public_key and _is_rotated(transport, config):
            yield Check("server", "ok", f"answers, version {info.version}; its key was rotated to {info.key_id}")
        elif info.public_key != config.public_key:
            detail = f"its key is {info.key_id}, but {config.key_id} was pinned when this device enrolled"
            yield Check(
                "server",
                "fail",
                detail,
                "enroll again only if the key was changed on purpose; otherwise do not trust it",
            )
        else:
            yield Check("server", "ok", f"answers, version {info.version}, its key {info.key_id} is the pinned one")
        yield _token(transport)
    skew = clock.skew
    if skew is None:
        yield Check("clock", "warn", "the server's response has no time")
    elif abs(skew) >= SKEW_SECONDS:
        detail = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server's"
        yield Check("clock", "warn", detail, "set it, preferably by NTP; leases use the server's clock meanwhile")
    else:
        yield Check("clock", "ok", "agrees with the server's")


def _is_rotated(transport: Transport, config: DeviceConfig) -> bool:
    """Returns whether the pinned key was rotated to the server's current key; the agent follows automatically."""
    try:
        keys = ServerKeys.model_validate_json(transport.request("GET", "/v1/server/keys").content)
        return bool(follow(config.public_key, keys))
    except (MobizoError, ValueError):
        return False


def _token(transport: Transport) -> Check:
    try:
        transport.request("GET", f"/v1/files/{'0' * 64}")  # a request without side effects, for no file
    except (Unauthorized, Forbidden) as error:
        detail = f"the server refuses this device ({error.detail})"
        return Check("token", "fail", detail, "it was revoked or has expired; enroll again with a new one-time token")
    except NotFound:
        return Check("token", "ok", "the server accepts this device")
    except MobizoError as error:
        return Check("token", "warn", error.detail)
    return Check("token", "warn", "the server answered a request for a file that does not exist")


def check_disk(home: AgentHome) -> Check:
    """Checks that a program and its runs fit the disk."""
    path = home.path
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    state: State = "fail" if free < MARGIN_BYTES else "warn" if free < MIN_DISK else "ok"
    remedy = "" if state == "ok" else "free some space, or move the home to a larger disk with --home"
    return Check("disk", state, f"{free / 1e9:.1f} GB free at {path}", remedy)


def check_memory() -> Check:
    """Checks that there is memory to train in."""
    spare = spare_bytes()
    little = spare < MIN_MEMORY
    remedy = "jobs that need more are declined; use a smaller recipe or a swap file" if little else ""
    return Check("memory", "warn" if little else "ok", f"{spare / 1e9:.1f} GB available", remedy)


def check_engine() -> Check:
    """Checks that an engine can run programs."""
    try:
        return Check("engine", "ok", f"native runner in {find_runner()}")
    except NoRunner as error:
        if has_python_runtime():
            detail = f"ExecuTorch's Python runtime is installed, but no native runner ({error.detail})"
            return Check("engine", "warn", detail, "the native runner needs less memory: install mobizo-runner")
        return Check("engine", "fail", error.detail, "install mobizo-runner, or mobizo[python-runtime]")


def check_phone(serial: str) -> Check:
    """Checks that adb reaches the phone."""
    try:
        return Check("phone", "ok", f"adb reaches {Adb(serial or None).device()}")
    except MobizoError as error:
        return Check("phone", "fail", error.detail)


def check_rules(home: AgentHome) -> tuple[Check, Rules]:
    """Checks that the owner's rules are readable and cannot be changed by other users."""
    try:
        rules, _ = load_rules(home.rules)
    except MobizoError as error:
        return Check("rules", "fail", error.detail), Rules()
    if not home.rules.exists():
        return Check("rules", "ok", f"no rules of the owner; {home.rules} may contain some"), rules
    stat = home.rules.stat()
    if stat.st_mode & 0o022 or stat.st_uid not in (os.geteuid(), 0):
        return Check(
            "rules", "fail", f"other users can change {home.rules}", f"`chown` it to yourself, `chmod 600 {home.rules}`"
        ), rules
    rule_names = ", ".join(sorted(rules.model_fields_set)) or "nothing"
    return Check("rules", "ok", f"{home.rules} sets {rule_names}"), rules


def check_sensors(rules: Rules, sensors: Sensors) -> Check:
    """Checks that every rule has a sensor and that training may start now."""
    readings = sensors.read()
    measured = [name for name, value in readings.model_dump(exclude={"at", "lost"}).items() if value is not None]
    decision = decide(rules, readings, 0.0)
    if decision.unknown:
        detail = f"this device has no sensor for {', '.join(decision.unknown)}"
        return Check("sensors", "warn", detail, "these rules are not enforced; see docs/policy.md")
    if decision.action == "wait":
        return Check("sensors", "warn", f"no training now: {decision.local_why}")
    return Check("sensors", "ok", f"this device measures {', '.join(measured)}")


def check_service() -> Check:
    """Checks that the agent starts with the machine."""
    units = installed_units()
    if units:
        return Check("service", "ok", f"{units[0]} is installed")
    if not Path("/run/systemd/system").is_dir():
        return Check("service", "ok", "this machine does not run systemd; start the agent with its own service manager")
    return Check("service", "warn", "the agent does not start with the machine", "`mobizo-agent install-service`")


def check_daemon(home: AgentHome) -> Check:
    """Checks that the agent runs and is not paused."""
    if not home.running():
        return Check("daemon", "warn", "no agent runs in this home", "`mobizo-agent run`")
    if home.paused.exists():
        return Check("daemon", "warn", "paused by the user", "`mobizo-agent resume`")
    status = home.status()
    return Check("daemon", "ok", f"the daemon runs: {status.state if status else 'starting'}")
