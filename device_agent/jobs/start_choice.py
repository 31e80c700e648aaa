"""Chooses the start of a job with start `auto`: the B that does best on the run's validation records, before training.

The device downloads the candidates of its lease and scores each of them, and B = 0, with the job's own program.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from device_agent.executors import F32
from device_agent.executors.process import Launcher
from device_agent.executors.program import TrainingProgram
from device_agent.jobs.lease_and_policy import PolicyGatedRun
from device_agent.memory import trim_heap
from device_agent.protocol.client import DeviceClient
from device_agent.training.evaluation import best_b
from device_agent.training.run import splits_of
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from shared.errors import NotFound
from shared.job import Progress
from shared.registry import AdapterManifest
from shared.zo.lora import load_adapter

WHY = "comparing adapters to go on from"


def choose_start(
    client: DeviceClient,
    policy_run: PolicyGatedRun,
    run: RunDirectory,
    plan: RunPlan,
    launcher: Launcher,
    candidates: Sequence[AdapterManifest],
) -> AdapterManifest | None:
    """Returns the best candidate, whose file is then the run's start; None if none is better than B = 0.

    plan: has no start yet. Candidates that were deleted meanwhile are skipped. Raises what `PolicyGatedRun.pace` and
    the launcher and its executors raise.
    """
    run.candidates.mkdir(parents=True, exist_ok=True, mode=0o700)
    loaded: list[tuple[AdapterManifest, F32]] = []
    for candidate in candidates:
        path = run.candidates / candidate.sha256
        with suppress(NotFound):
            policy_run.transfer(partial(client.download_adapter, candidate, path), download=True)
            loaded.append((candidate, load_adapter(path.read_bytes(), candidate.size_d)))
    index = _best_of(policy_run, run, plan, launcher, [flat for _, flat in loaded]) if loaded else 0
    best = loaded[index - 1][0] if index else None
    if best is not None:
        (run.candidates / best.sha256).replace(run.start)
    shutil.rmtree(run.candidates)
    return best


def _best_of(
    policy_run: PolicyGatedRun, run: RunDirectory, plan: RunPlan, launcher: Launcher, candidates: Sequence[F32]
) -> int:
    """Returns the number of the best candidate, from 1; 0 for B = 0, and if no record fits the task."""
    progress = Progress(phase="evaluating", steps=plan.training.steps, why=WHY)
    turns = policy_run.pace(itertools.repeat(None), progress)
    next(turns)
    manifest, dynamic = plan.manifest, plan.dynamic_length
    splits = splits_of(run, plan)
    if splits.blank:
        return 0
    trim_heap()  # of the tokenizer, before the program takes its memory
    executor = launcher.launch(manifest, plan.program, plan.weights)
    try:
        program, starts = TrainingProgram(manifest, executor), (np.zeros(manifest.size, np.float32), *candidates)
        return best_b(program, splits.validation, manifest.recipe, starts, lambda: next(turns), dynamic=dynamic)
    finally:
        executor.close()
