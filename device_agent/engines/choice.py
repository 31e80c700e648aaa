"""Selects the engine for a program: the native runner if available, otherwise ExecuTorch's Python runtime."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import structlog

from device_agent.android.adb import Adb
from device_agent.engines import Engine
from device_agent.engines.adb import AdbEngine
from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.errors import NoRunner
from device_agent.home import AgentHome
from device_agent.memory import total_bytes
from device_agent.protocol.client import DeviceClient
from device_agent.runner.location import (
    EXECUTORCH,
    PROGRAM,
    RUNNER_VARIABLE,
    RunnerLocation,
    check_machine,
    host_platform,
)
from device_agent.runner.supply import RunnerResult, ensure_runner
from shared.capabilities import NOISE_OPERATOR, Capabilities, EngineKind
from shared.errors import BadRequest
from shared.program import ProgramManifest
from shared.recipe import RUNNER_BACKENDS
from shared.signing import parse_public

_log = structlog.get_logger()


class EngineName(StrEnum):
    """The engines; see `device_agent.engines`."""

    NATIVE = "native"
    PYTHON = "python"
    ADB = "adb"


@dataclass(frozen=True)
class EngineSelector:
    """Selects an engine for each program. requested_name: the user's choice; None: the best. phone: behind adb."""

    home: AgentHome
    requested_name: EngineName | None = None
    phone: Adb | None = None

    def __call__(self, manifest: ProgramManifest) -> Engine:
        """Returns the engine for a program. Raises NoRunner if it is unavailable, BadRequest if it cannot run the
        program.
        """
        backend = manifest.recipe.backend
        if self.phone is not None or self.requested_name is EngineName.ADB:
            _check_backend(backend)
            adb = self.phone or Adb()
            return AdbEngine(adb, _require_runner(self._supply(phone_platform(adb))))
        if self.requested_name is EngineName.PYTHON or (self.requested_name is None and backend not in RUNNER_BACKENDS):
            return PythonEngine()
        _check_backend(backend)
        supply = self._supply(None)
        only_native = manifest.recipe.noise == "operator"
        if supply.directory is None and self.requested_name is None and not only_native and _has_python_runtime():
            _log.warning("no native runner; ExecuTorch's Python runtime trains instead", why=supply.reason)
            return PythonEngine()
        return NativeEngine(_require_runner(supply))

    def capabilities(self) -> Capabilities:
        """Returns what this device can train, without downloading or building anything."""
        if self.phone is not None or self.requested_name is EngineName.ADB:
            return _with_runner("adb", Capabilities.model_validate({}))  # the phone's memory is not known
        capabilities = Capabilities(total_bytes=total_bytes(), engines=(), backends=(), operators=(), executorch=None)
        if self.requested_name is EngineName.NATIVE or (self.requested_name is None and self._may_have_runner()):
            capabilities = _with_runner("native", capabilities)
        if self.requested_name is not EngineName.NATIVE and _has_python_runtime():
            capabilities = _with_python(capabilities)
        return capabilities

    def _may_have_runner(self) -> bool:
        """Returns whether the native runner exists or can be obtained when first needed."""
        if os.environ.get(RUNNER_VARIABLE):
            return True
        location = RunnerLocation.within(self.home.path)
        return location.find() is not None or location.remembered(location.path.name) is None

    def _supply(self, platform: str | None) -> RunnerResult:
        runner_directory = os.environ.get(RUNNER_VARIABLE)
        if runner_directory:
            directory = Path(runner_directory)
            if not (directory / PROGRAM).is_file():
                raise NoRunner(
                    f"${RUNNER_VARIABLE} is {runner_directory}, which holds no {PROGRAM}; correct or unset it"
                )
            check_machine(directory, platform or host_platform())
            return RunnerResult(directory)
        config = self.home.config()
        with DeviceClient(config.server, config.token) as client:
            location = RunnerLocation.within(self.home.path, platform)
            return ensure_runner(location, client, parse_public(config.public_key), lambda line: _log.info(line))


def phone_platform(adb: Adb) -> str:
    """Returns the phone's platform as runner builds name it, such as android-arm64. Raises PhoneUnreachable."""
    abi, machine = adb.run("echo $(getprop ro.product.cpu.abi 2>/dev/null); uname -m").splitlines()[:2]
    return platform_name(abi.strip(), machine.strip())


def platform_name(abi: str, machine: str) -> str:
    """Returns the platform of an Android ABI, such as arm64-v8a, or of a board with adbd and no Android (abi is empty).

    machine: of the kernel, which may be of 64 bits where Android's own programs are of 32.
    """
    return f"android-{abi.partition('-')[0].replace('armeabi', 'arm')}" if abi else f"linux-{machine}"


def _with_runner(engine: EngineKind, capabilities: Capabilities) -> Capabilities:
    return capabilities.model_copy(
        update={
            "engines": (engine,),
            "backends": RUNNER_BACKENDS,
            "operators": (NOISE_OPERATOR,),
            "executorch": EXECUTORCH,
        }
    )


def _with_python(capabilities: Capabilities) -> Capabilities:
    """Adds the capabilities of ExecuTorch's and PyTorch's Python runtimes."""
    return capabilities.model_copy(
        update={
            "engines": (*(capabilities.engines or ()), "python"),
            "backends": (*RUNNER_BACKENDS, "torch"),
            "executorch": capabilities.executorch or _python_executorch(),
        }
    )


def _python_executorch() -> str | None:
    try:
        return version("executorch")
    except PackageNotFoundError:
        return None


def _check_backend(backend: str) -> None:
    if backend not in RUNNER_BACKENDS:
        raise BadRequest(f"the native runner has no backend {backend!r}; train with --engine python")


def _require_runner(supply: RunnerResult) -> Path:
    if supply.directory is None:
        raise NoRunner(supply.reason)
    return supply.directory


def _has_python_runtime() -> bool:
    return all(find_spec(name) is not None for name in ("executorch", "torch"))
