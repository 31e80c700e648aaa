"""Selects what executes a program: the native runner if it is installed, otherwise ExecuTorch's Python runtime."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec

import psutil
import structlog

from device_agent.android.adb import Adb
from device_agent.errors import NoRunner
from device_agent.executors.phone import PhoneLauncher
from device_agent.executors.process import Launcher
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import EXECUTORCH, find_runner
from shared.capabilities import NOISE_OPERATOR, Capabilities, EngineKind
from shared.errors import BadRequest
from shared.program import ProgramManifest
from shared.recipe import RUNNER_BACKENDS

_log = structlog.get_logger()


class ExecutorName(StrEnum):
    """The kinds of executors on this machine; see `device_agent.executors`."""

    NATIVE = "native"
    PYTHON = "python"


@dataclass(frozen=True)
class LauncherSelector:
    """Selects a launcher for each program. requested: the user's choice; None: the best. phone: behind adb."""

    requested: ExecutorName | None = None
    phone: Adb | None = None

    def __call__(self, manifest: ProgramManifest) -> Launcher:
        """Returns the launcher for a program. Raises NoRunner if it is unavailable, BadRequest if it cannot run the
        program.
        """
        backend = manifest.recipe.backend
        if self.phone is not None:
            _check_backend(backend)
            return PhoneLauncher(self.phone, find_runner(phone_platform(self.phone)))
        if self.requested is ExecutorName.PYTHON or (self.requested is None and backend not in RUNNER_BACKENDS):
            return PythonLauncher()
        _check_backend(backend)
        try:
            return RunnerLauncher(find_runner())
        except NoRunner as error:
            if self.requested is not None or manifest.recipe.noise == "operator" or not has_python_runtime():
                raise
            _log.warning("no native runner; ExecuTorch's Python runtime trains instead", why=error.detail)
            return PythonLauncher()

    def capabilities(self) -> Capabilities:
        """Returns what this device can train."""
        if self.phone is not None:  # whose memory is not known
            return Capabilities(
                engines=("adb",), backends=RUNNER_BACKENDS, operators=(NOISE_OPERATOR,), executorch=EXECUTORCH
            )
        runner = self.requested is not ExecutorName.PYTHON and (self.requested is not None or _has_runner())
        python = self.requested is not ExecutorName.NATIVE and has_python_runtime()
        engines: list[EngineKind] = []
        if runner:
            engines.append("native")
        if python:
            engines.append("python")
        return Capabilities(
            total_bytes=psutil.virtual_memory().total,
            engines=tuple(engines),
            backends=(*RUNNER_BACKENDS, "torch") if python else RUNNER_BACKENDS if runner else (),
            operators=(NOISE_OPERATOR,) if runner else (),
            executorch=EXECUTORCH if runner else version("executorch") if python else None,
        )


def phone_platform(adb: Adb) -> str:
    """Returns the phone's platform as runner builds name it, such as android-arm64. Raises PhoneUnreachable."""
    abi, machine = adb.run("echo $(getprop ro.product.cpu.abi 2>/dev/null); uname -m").splitlines()[:2]
    return platform_name(abi.strip(), machine.strip())


def platform_name(abi: str, machine: str) -> str:
    """Returns the platform of an Android ABI, such as arm64-v8a, or of a board with adbd and no Android (abi is empty).

    machine: of the kernel, which may be of 64 bits where Android's own programs are of 32.
    """
    return f"android-{abi.partition('-')[0].replace('armeabi', 'arm')}" if abi else f"linux-{machine}"


def _check_backend(backend: str) -> None:
    if backend not in RUNNER_BACKENDS:
        raise BadRequest(f"the native runner has no backend {backend!r}; train with --executor python")


def _has_runner() -> bool:
    try:
        find_runner()
    except NoRunner:
        return False
    return True


def has_python_runtime() -> bool:
    """Returns whether ExecuTorch's Python runtime and PyTorch are installed."""
    return all(find_spec(name) is not None for name in ("executorch", "torch"))
