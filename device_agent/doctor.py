"""What is wrong on this device, and what to do about it: one check, one line. Changes nothing.

Knows no job; never imports a runtime.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from device_agent.adb import Adb
from device_agent.cache import MARGIN_BYTES
from device_agent.clock import ServerClock
from device_agent.control import Pause, Question, ask
from device_agent.errors import NoRunner
from device_agent.memory import spare_bytes
from device_agent.policy import decide
from device_agent.rules_file import load_rules
from device_agent.runner_place import RunnerPlace, host_platform
from device_agent.runner_tools import check_compiler
from device_agent.sensors import Sensors
from device_agent.sensors_linux import LinuxSensors
from device_agent.service import installed_units
from device_agent.state import DeviceConfig, Home
from shared.checkup import Check, State
from shared.errors import Forbidden, MobizoError, NotFound, Unauthorized
from shared.protocol import ServerInfo
from shared.rules import Rules
from shared.succession import ServerKeys, follow
from shared.transport import Transport

ANSWER_SECONDS = 5.0  # that the server may take
SKEW_SECONDS = 60.0
LITTLE_DISK, LITTLE_MEMORY = 2 * 10**9, 10**9  # bytes; a small model and its run fit above


def examine(home: Home, adb: str | None = None, sensors: Sensors | None = None) -> Iterator[Check]:
    """Every check, as it is made. adb: the phone to look for, "" for the only one, None for no phone."""
    yield check_home(home)
    enrolled, config = check_enrolled(home)
    yield enrolled
    if config is not None:
        yield from check_server(config)
    yield check_disk(home)
    yield check_memory()
    yield check_engine(home)
    if adb is not None:
        yield check_phone(adb)
    rules, found = check_rules(home)
    yield rules
    yield check_sensors(found, LinuxSensors() if sensors is None else sensors)
    yield check_service()
    yield check_daemon(home)


def check_home(home: Home) -> Check:
    """The home is there, and its secrets are for this user alone."""
    if not home.path.is_dir():
        return Check("home", "fail", f"{home.path} is not there", "`mobizo-agent enroll` makes it")
    secret = (home.path, home.path / "config.json", home.path / "device.key")
    for path in (path for path in secret if path.exists()):
        stat = path.stat()
        if stat.st_uid != os.geteuid():
            return Check("home", "fail", f"{path} is another user's", f"run as that user, or `chown` {home.path}")
        if stat.st_mode & 0o077:
            mode = "700" if path.is_dir() else "600"
            return Check("home", "fail", f"others may look into {path}", f"`chmod {mode} {path}`")
    return Check("home", "ok", f"{home.path}, for this user alone")


def check_enrolled(home: Home) -> tuple[Check, DeviceConfig | None]:
    """A server was joined."""
    try:
        config = home.config()
    except MobizoError as error:
        return Check("enrolled", "fail", error.detail), None
    return Check("enrolled", "ok", f"as {config.name} ({config.device_id}) at {config.server}"), config


def check_server(config: DeviceConfig) -> Iterator[Check]:
    """The server answers, signs with the pinned key, knows this device, and agrees about the time."""
    clock = ServerClock()
    with Transport(config.server, config.token, timeout=ANSWER_SECONDS, attempts=1) as transport:
        try:
            answer = transport.request("GET", "/v1/server")
            clock.hear(answer.headers.get("Date"))
            info = ServerInfo.model_validate_json(answer.content)
        except MobizoError as error:
            yield Check("server", "fail", error.detail, "check its address, that it runs, and this device's network")
            return
        except ValueError:
            yield Check("server", "fail", f"{config.server} does not answer as a mobizo server", "check its address")
            return
        if info.public_key != config.public_key and _handed_over(transport, config):
            yield Check("server", "ok", f"answers, version {info.version}; its key handed over to {info.key_id}")
        elif info.public_key != config.public_key:
            told = f"its key is {info.key_id}, but {config.key_id} was pinned when this device enrolled"
            yield Check(
                "server", "fail", told, "if the key was changed on purpose, enrol again; else trust nothing of it"
            )
        else:
            yield Check("server", "ok", f"answers, version {info.version}, its key {info.key_id} is the pinned one")
        yield _token(transport)
    skew = clock.skew
    if skew is None:
        yield Check("clock", "warn", "the server tells no time")
    elif abs(skew) >= SKEW_SECONDS:
        told = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server's"
        yield Check("clock", "warn", told, "set it, best by NTP; leases go by the server's clock meanwhile")
    else:
        yield Check("clock", "ok", "agrees with the server's")


def _handed_over(transport: Transport, config: DeviceConfig) -> bool:
    """Whether the pinned key leads to the one that signs now: the agent follows by itself."""
    try:
        keys = ServerKeys.model_validate_json(transport.request("GET", "/v1/server/keys").content)
        return bool(follow(config.public_key, keys))
    except (MobizoError, ValueError):
        return False


def _token(transport: Transport) -> Check:
    # The one question of a device's that changes nothing.
    try:
        transport.request("GET", f"/v1/runners/{host_platform()}")
    except (Unauthorized, Forbidden) as error:
        told = f"the server refuses this device ({error.detail})"
        return Check("token", "fail", told, "it was revoked or has expired; enrol again with a new one-time token")
    except NotFound:
        return Check("token", "ok", "the server knows this device")
    except MobizoError as error:
        return Check("token", "warn", error.detail)
    return Check("token", "ok", f"the server knows this device, and has a native runner for {host_platform()}")


def check_disk(home: Home) -> Check:
    """There is room for a program and its runs."""
    place = home.path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    state: State = "fail" if free < MARGIN_BYTES else "warn" if free < LITTLE_DISK else "ok"
    remedy = "" if state == "ok" else "free some, or move the home to a larger disk with --home"
    return Check("disk", state, f"{free / 1e9:.1f} GB free at {place}", remedy)


def check_memory() -> Check:
    """There is memory to train in."""
    spare = spare_bytes()
    few = spare < LITTLE_MEMORY
    remedy = "jobs that need more are declined; a smaller recipe (`shrink`) or a swap file may help" if few else ""
    return Check("memory", "warn" if few else "ok", f"{spare / 1e9:.1f} GB available", remedy)


def check_engine(home: Home) -> Check:
    """Something here can run a program."""
    place = RunnerPlace.within(home.path)
    found = place.find() if place.directory.is_dir() else None
    if found is not None:
        return Check("engine", "ok", f"native runner in {found}")
    python = all(find_spec(name) is not None for name in ("executorch", "torch"))
    try:
        check_compiler()
        get = "`mobizo-agent build-runner` builds the native one"
    except NoRunner as error:
        get = f"the native one cannot be built here ({error.detail}); an operator may add a build to the server"
    if python:
        return Check("engine", "warn", "no native runner yet; ExecuTorch's Python runtime is there", get)
    return Check("engine", "fail", "no native runner, and no ExecuTorch for Python", get)


def check_phone(serial: str) -> Check:
    """adb reaches the phone."""
    try:
        return Check("phone", "ok", f"adb reaches {Adb(serial or None).device()}")
    except MobizoError as error:
        return Check("phone", "fail", error.detail)


def check_rules(home: Home) -> tuple[Check, Rules]:
    """The owner's rules can be read, and nobody else can change them."""
    try:
        rules = load_rules(home.rules)
    except MobizoError as error:
        return Check("rules", "fail", error.detail), Rules()
    if not home.rules.exists():
        return Check("rules", "ok", f"none of the owner's; {home.rules} may state some"), rules
    stat = home.rules.stat()
    if stat.st_mode & 0o022 or stat.st_uid not in (os.geteuid(), 0):
        return Check(
            "rules", "fail", f"others may change {home.rules}", f"`chown` it to yourself, `chmod 600 {home.rules}`"
        ), rules
    stated = ", ".join(sorted(rules.model_fields_set)) or "nothing"
    return Check("rules", "ok", f"{home.rules} states {stated}"), rules


def check_sensors(rules: Rules, sensors: Sensors) -> Check:
    """Every rule of the owner's has a sensor, and training may begin now."""
    readings = sensors.read()
    seen = [name for name, value in readings.model_dump(exclude={"at"}).items() if value is not None]
    decision = decide(rules, readings, 0.0)
    if decision.unknown:
        told = f"no sensor here answers {', '.join(decision.unknown)}"
        return Check("sensors", "warn", told, "such rules are not held; docs/policy.md has the sensors")
    if decision.action == "wait":
        return Check("sensors", "warn", f"no training now: {decision.why}")
    return Check("sensors", "ok", f"this device tells {', '.join(seen)}")


def check_service(is_systemd: Callable[[], bool] = Path("/run/systemd/system").is_dir) -> Check:
    """The agent starts with the machine."""
    units = installed_units()
    if units:
        return Check("service", "ok", f"{units[0]} is installed")
    if not is_systemd():
        return Check("service", "ok", "this machine does not run systemd; start the agent by what it has")
    return Check("service", "warn", "the agent does not start with the machine", "`mobizo-agent install-service`")


def check_daemon(home: Home) -> Check:
    """The agent runs, answers, and is not paused."""
    if not home.running():
        return Check("daemon", "warn", "no agent runs in this home", "`mobizo-agent run`")
    try:
        status = ask(home.control, Question(ask="status")).status
    except MobizoError as error:
        return Check("daemon", "fail", f"it runs but {error.detail}", "`mobizo-agent logs` may say why; restart it")
    if Pause(home.path):
        return Check("daemon", "warn", "paused by a person", "`mobizo-agent resume`")
    return Check("daemon", "ok", f"it runs: {status.state if status else 'starting'}")
