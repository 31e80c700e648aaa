"""A run on a phone that goes on from an adapter: the plan takes B there, and the bytes are the native engine's.

With pulls towards that B, too.
"""

import pytest

from device_agent.engines.adb import AdbEngine
from device_agent.engines.native import NativeEngine
from device_agent.training.journal import RunDirectory
from shared.canonical import file_sha256
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.android.conftest import TRAINING
from tests.device_agent.warm_starts import begin_from, random_b

FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


@pytest.mark.parametrize("proximal", [0, 0.5])
@pytest.mark.slow
def test_a_phone_goes_on_from_the_same_b(adb, runner_directory, rademacher, movies, tmp_path, proximal):
    runs = []
    for engine in (AdbEngine(adb, runner_directory, poll_seconds=0.05), NativeEngine(runner_directory)):
        run = RunDirectory(tmp_path / engine.name)
        begin_from(run, rademacher.plan(movies, **TRAINING, proximal=proximal), random_b(rademacher.manifest))
        assert engine.train(run, lambda progress: None, lambda: False).result.start_accuracy is not None
        runs.append([file_sha256(run.path / name) for name in FILES])
    assert runs[0] == runs[1]
    trajectory, _ = parse_trajectory((tmp_path / "adb" / "trajectory.bin").read_bytes())
    assert bool(trajectory.pulls) is bool(proximal)
    assert trajectory.header.start_sha256 == file_sha256(tmp_path / "adb" / "start.safetensors")
