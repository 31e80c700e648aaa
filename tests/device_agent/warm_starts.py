"""Adapter versions as a server vouches for them, and runs that go on from one."""

import numpy as np

from device_agent.training.run_directory import RunDirectory
from shared.canonical import sha256_hex
from shared.registry import AdapterManifest
from shared.result import Result
from shared.signing import sign_adapter
from shared.training_settings import TrainingSettings
from shared.zo.lora import dump_adapter
from tests.device_agent.fake_server import NOW
from tests.device_agent.tiny import TASK

RESULT = Result(
    steps=1, best_step=1, train_seconds=1, seconds=1, peak_rss_bytes=1, train_examples=1, truncated_examples=0
)


def random_b(manifest, seed=1):
    """A flat B (D,) that changes what a program says."""
    return np.random.default_rng(seed).normal(0, 0.1, manifest.size).astype(np.float32)


def begin_from(path, plan, flat):
    """Begins a run in a new directory that starts from flat B (D,); returns the run."""
    run, data = RunDirectory(path), dump_adapter(flat, {})
    path.mkdir(parents=True)
    run.start.write_bytes(data)
    run.begin(plan.model_copy(update={"start": run.start, "start_sha256": sha256_hex(data)}))
    return run


def vouched(program, key, seed=1, version=1, **changes):
    """A signed version of adapter `alice-movies` of a compiled program, and its file."""
    manifest, data = program.manifest, dump_adapter(random_b(program.manifest, seed), {})
    facts = {
        "tenant": "default",
        "adapter": "alice-movies",
        "version": version,
        "user": "alice",
        "base": manifest.recipe.base,
        "recipe": manifest.recipe,
        "recipe_id": manifest.recipe_id,
        "a_sha256": manifest.a_sha256,
        "sha256": sha256_hex(data),
        "size": len(data),
        "size_d": manifest.size,
        "job_id": f"job-of-{version}",
        "device_id": "device-1",
        "task": TASK,
        "training": TrainingSettings(),
        "result": RESULT,
        "created_at": NOW,
    }
    return sign_adapter(AdapterManifest(**facts | changes), key), data
