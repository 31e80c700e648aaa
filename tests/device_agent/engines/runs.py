"""What a run left, and a way to kill it."""

import contextlib
import signal

import psutil

from shared.canonical import file_sha256
from shared.zo.trajectory import parse_trajectory

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


def hashes(run):
    return [file_sha256(run.path / name) for name in FILES]


def ledger(run):
    return parse_trajectory(run.ledger.read_bytes())[0]


def recorded_steps(run):
    """Returns the number of steps in a run's ledger, which another process may be writing; 0 without its header."""
    trajectory = ledger(run) if run.ledger.exists() else None
    return 0 if trajectory is None else trajectory.steps


class KillAt:
    """A report that kills the training process of this process -9, once, at a step."""

    def __init__(self, step):
        self._step, self._killed = step, False

    def __call__(self, progress):
        if progress.phase == "training" and progress.step >= self._step and not self._killed:
            self._killed = True
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.ZombieProcess):  # another test's
                    if {"train", "device_agent.training.trainer_process"} & set(child.cmdline()):
                        child.send_signal(signal.SIGKILL)
