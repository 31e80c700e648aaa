"""A personal model for inference: a stored adapter with its program, tokenizer and task, from this device's disk."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore, LoadedAdapter, StoredAdapter
from device_agent.inference.session import InferenceSession, open_inference
from device_agent.programs import ProgramCache
from shared.errors import BadRequest, NotFound
from shared.program import ProgramFile, ProgramManifest, Role
from shared.task import Task
from shared.tokenizer import read_tokenizer


@dataclass(frozen=True)
class PersonalModel:
    """A base model with one user's adapter, ready to score and to generate."""

    name: str
    task: Task
    manifest: ProgramManifest
    tokenizer: Tokenizer
    inference: InferenceSession

    @property
    def context(self) -> int:
        """Maximum tokens of a text and its continuation."""
        return self.manifest.inference_context or 0

    def runs(self, manifest: ProgramManifest) -> bool:
        """Returns whether the loaded program is that of a manifest."""
        return (self.manifest.recipe_id, self.manifest.files) == (manifest.recipe_id, manifest.files)

    def close(self) -> None:
        """Frees the program's memory."""
        self.inference.close()


def open_personal(home: AgentHome, name: str, *, base: bool = False) -> PersonalModel:
    """Loads the newest version of an adapter. base: the base model without it.

    Raises NotFound if the adapter or one of its program's files is missing, Untrusted, BadRequest, RuntimeFailed.
    """
    opened = AdapterStore(home).open(name, *home.config().trusted_keys())
    model = load_program(home, opened)
    if not base:
        model.inference.load(opened.flat)
    return model


def load_program(home: AgentHome, opened: LoadedAdapter) -> PersonalModel:
    """Loads the program of an adapter with B = 0. Raises like `open_personal`."""
    name = opened.about.name
    absent = [file.role for file in missing(home, opened.about)]
    if absent:
        raise NotFound(
            f"the {' and '.join(absent)} of {name!r} are not on this device; "
            f"`mobizo-agent adapter pull {name}` downloads them while the server is reachable"
        )
    cache, manifest = ProgramCache(home.cache), opened.manifest
    if manifest.inference_context is None:
        raise BadRequest(f"a program of backend {manifest.recipe.backend} has no inference file; use xnnpack")
    return open_model(name, opened.about.task, manifest, {file.role: cache.path(file) for file in manifest.files})


def open_model(name: str, task: Task, manifest: ProgramManifest, paths: Mapping[Role, Path]) -> PersonalModel:
    """Loads a program's files for inference with B = 0. paths: by role. Raises like `open_inference`."""
    with ThreadPoolExecutor(1) as pool:  # the runner packs weights while the tokenizer is read
        reading = pool.submit(read_tokenizer, paths["tokenizer"].read_bytes())
        inference = open_inference(manifest, paths["inference"], paths["weights"])
        return PersonalModel(name, task, manifest, reading.result(), inference)


def missing(home: AgentHome, about: StoredAdapter) -> list[ProgramFile]:
    """Returns the needed files that are not in the cache."""
    cache = ProgramCache(home.cache)
    return [file for file in about.files if not cache.holds(file)]
