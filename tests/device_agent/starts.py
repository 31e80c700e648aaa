"""Runs that go on from an adapter: its file in the run's directory, and a plan that names it."""

import numpy as np

from shared.canonical import sha256_hex
from shared.lora import dump_adapter


def random_b(manifest, seed=1):
    """A flat B (D,) that changes what a program says."""
    return np.random.default_rng(seed).normal(0, 0.1, manifest.size).astype(np.float32)


def begin_from(run, plan, flat):
    """Begins a run that goes on from flat B (D,); returns its plan."""
    data = dump_adapter(flat, {})
    run.path.mkdir(parents=True)
    run.start.write_bytes(data)
    plan = plan.model_copy(update={"start": run.start, "start_sha256": sha256_hex(data)})
    run.begin(plan)
    return plan
