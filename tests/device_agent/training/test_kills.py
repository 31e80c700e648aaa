"""Kills with -9 of the process that trains, of its executor, and of both: the files are those of an undisturbed run."""

import multiprocessing
import os
import signal

import psutil
import pytest

from device_agent.executors.runner import RunnerLauncher
from tests.device_agent.training.runs import begun, hashes, ledger, recorded_steps, train, train_and_tell

TRAINING = {"steps": 120, "evaluation_interval": 40, "seed": 9}
# Before the first step, about an evaluation, and at the last step.
MOMENTS = {
    "loop": (0, 2, 40, 120),
    "executor": (0, 1, 41, 90),
    "both": (1, 39, 40, 119),
}
PROCESSES = multiprocessing.get_context("forkserver")  # whose processes have no torch, and start in a moment
PROCESSES.set_forkserver_preload(["tests.device_agent.training.runs"])


class Agent:
    """A process that trains a run, with its executor."""

    def __init__(self, run, launcher):
        self._messages, other_end = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=train_and_tell, args=(run, launcher, other_end))
        self.process.start()
        other_end.close()
        self.steps = []

    def kill_at(self, step, victim):
        """Kills once a step was reported, at 0 once the executor lives. Returns the executor's process."""
        while max(self.steps, default=0) < step:
            self.steps.append(self._messages.recv())
        agent = psutil.Process(self.process.pid)
        while not (executors := agent.children()):
            assert self.process.is_alive()
        if victim in ("executor", "both"):
            os.kill(executors[0].pid, signal.SIGKILL)
        if victim in ("loop", "both"):
            self.process.kill()
        return executors[0]

    def end(self):
        """Reads what was told until the process ended, by itself or by a kill. Returns its error."""
        error = None
        try:
            while True:
                message = self._messages.recv()
                if isinstance(message, int):
                    self.steps.append(message)
                else:
                    error = message
        except EOFError:
            self.process.join()
        return error


@pytest.mark.parametrize("victim", MOMENTS)
@pytest.mark.parametrize("name", ["rademacher", "gradient"])  # resumed by its ledger, and from checkpoints
def test_killed_at_a_step_the_run_ends_with_the_same_bytes(request, tmp_path, dataset, runner_directory, name, victim):
    plan, launcher = request.getfixturevalue(name).plan(dataset, **TRAINING), RunnerLauncher(runner_directory)
    whole, run = begun(tmp_path / "whole", plan), begun(tmp_path / "run", plan)
    train(whole, launcher)
    steps, before = [], []
    for moment in MOMENTS[victim]:
        if moment and recorded_steps(run) >= moment:  # the killed one made steps that it did not report
            continue
        agent = Agent(run, launcher)
        executor = agent.kill_at(moment, victim)
        error = agent.end()
        if victim == "executor":
            assert error == "the executor was killed, probably out of memory; the run will resume"
        assert not psutil.wait_procs([executor], 30)[1]
        steps += agent.steps
        recorded = ledger(run) if run.trajectory.exists() else None  # None: killed before its header was whole
        after = [] if recorded is None else [coefficients.tobytes() for coefficients in recorded.coefficients]
        assert after[: len(before)] == before
        assert max(steps, default=0) <= len(after)
        before = after
    if run.result() is None:
        agent = Agent(run, launcher)
        assert agent.end() is None
        steps += agent.steps
    assert hashes(run) == hashes(whole)
    assert steps == sorted(set(steps))  # no recorded step was computed again
