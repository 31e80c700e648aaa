"""Scores what a trained adapter writes, for a job whose metric compares texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.jobs.lease_and_policy import PolicyGatedRun
from device_agent.training.journal import RunDirectory
from shared.errors import InvalidDataset
from shared.job import Progress, Result
from shared.program import ProgramFile, ProgramManifest
from shared.zo.lora import load_adapter

_log = structlog.get_logger()


def with_text_scores(
    policy_run: PolicyGatedRun,
    run: RunDirectory,
    result: Result,
    fetch: Callable[[ProgramFile], Path],
    runner: Path | None,
) -> Result:
    """Returns a run's result with scores of written texts, and records it; as it was if they cannot be measured here.

    fetch: returns a file's path, downloaded if needed. runner: the native runner's directory. Raises PolicyForbids and
    Halted as `PolicyGatedRun.pace`.
    """
    # Here, because most jobs compare no texts, and an idle agent stays small.
    from device_agent.inference.samples import score_writing

    why = "writing held-out texts, to compare them with the examples' own"
    progress = Progress(phase="evaluating", step=result.steps, steps=result.steps, why=why)
    policy_run.report(progress)
    try:
        plan = run.plan()
        manifest: ProgramManifest = plan.manifest
        paths = {file.role: fetch(file) for file in manifest.files}
        before, after = score_writing(
            plan,
            paths["inference"],
            runner,
            load_adapter(run.best.read_bytes(), manifest.size),
            lambda prompts: policy_run.pace(prompts, manifest, progress),
        )
    except (DoesNotFit, InvalidDataset, RuntimeFailed) as error:
        _log.warning("held-out texts were not scored", detail=error.detail)
        return result
    result = result.model_copy(update={"written_before": before, "written_after": after})
    run.finish(result)
    return result
