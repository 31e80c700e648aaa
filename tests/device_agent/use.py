"""A home whose adapter store holds an adapter of a compiled program."""

import shutil

import numpy as np

from device_agent.inference.adapter_store import AdapterStore
from shared.signing import sign_manifest
from shared.zo.lora import dump_adapter
from tests.device_agent.homes import enroll
from tests.device_agent.tiny import TASK


def keep_adapter(home, program, key, name="alice-movies", task=TASK, seed=1):
    """Keeps a random adapter of `program`, signed by `key`; returns its flat B."""
    enroll(home, "http://127.0.0.1:9", key)  # nobody is there
    for role in ("weights", "tokenizer", "inference"):
        file = program.manifest.file(role)
        shutil.copy(program.path(role), home.cache / file.sha256)
    flat = np.random.default_rng(seed).normal(0, 0.1, program.manifest.size).astype(np.float32)
    AdapterStore(home).add(name, dump_adapter(flat, {}), sign_manifest(program.manifest, key), task, "job-1")
    return flat
