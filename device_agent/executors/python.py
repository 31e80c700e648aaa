"""Executors in Python: ExecuTorch's own runtime, or PyTorch for programs of backend `torch`.

Both need torch, so each executor is a process of its own, which returns the memory when it ends. A process that has
torch anyway can open a program in itself by `open_program`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from device_agent.errors import RuntimeFailed
from device_agent.executors import Executor
from device_agent.executors.process import Launcher, program_name
from device_agent.executors.program import TrainingProgram
from shared.program import ProgramManifest


class PythonLauncher(Launcher):
    """Starts a Python process for each program."""

    name = "python"

    def command(
        self, manifest: ProgramManifest, program: Path, weights: Path, resident: bool, stop: Callable[[], bool]
    ) -> list[str]:
        """Returns the command of `python_process`."""
        check_runs_in_python(manifest)
        command = [sys.executable, "-m", "device_agent.executors.python_process", manifest.recipe.backend]
        return [*command, str(program), str(weights), *(["--resident"] if resident else [])]


def check_runs_in_python(manifest: ProgramManifest) -> None:
    """Raises RuntimeFailed for a program that calls an operator of the native runner."""
    if manifest.recipe.noise == "operator":
        raise RuntimeFailed(
            f"{program_name(manifest)} calls the noise operator, which ExecuTorch's Python runtime lacks; "
            "train with the native runner: pip install mobizo-runner"
        )


def open_executor(backend: str, program: Path, weights: Path, *, resident: bool = False) -> Executor:
    """Opens a program of a recipe's backend in this process. Raises RuntimeFailed."""
    # Imported here because ExecuTorch and torch use hundreds of megabytes.
    if backend == "torch":
        from device_agent.executors.torch_export import TorchExecutor

        return TorchExecutor(program, weights)
    from device_agent.executors.executorch_runtime import ExecuTorchExecutor

    return ExecuTorchExecutor(program, weights, resident=resident)


def open_program(manifest: ProgramManifest, program: Path, weights: Path, *, resident: bool = False) -> TrainingProgram:
    """Opens a training program in this process, with B = 0. resident: see `Launcher.launch`. Raises RuntimeFailed."""
    check_runs_in_python(manifest)
    try:
        executor = open_executor(manifest.recipe.backend, program, weights, resident=resident)
    except RuntimeFailed as error:
        raise RuntimeFailed(f"{program_name(manifest)} does not load ({error.detail})") from error
    return TrainingProgram(manifest, executor)


def use_threads(count: int) -> None:
    """Sets the number of threads of every program that this process loads from now on, for ExecuTorch and torch."""
    import torch  # first, because the extension module links against its libraries
    from executorch.extension.pybindings import _C

    torch.set_num_threads(count)
    _C._unsafe_reset_threadpool(count)
