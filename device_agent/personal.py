"""A kept adapter at work on this device: its program, its tokenizer and its task, from this disk alone.

Knows no network and no command line.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from device_agent.adapters import AdapterShelf, KeptAdapter
from device_agent.cache import FileCache
from device_agent.engines.choice import local_runner
from device_agent.inference import Inference, open_inference
from device_agent.state import Home
from shared.errors import BadRequest, NotFound
from shared.program import ProgramFile, ProgramManifest
from shared.task import Task


@dataclass(frozen=True)
class PersonalModel:
    """A base model with one person's adapter, ready to score and to generate."""

    name: str
    task: Task
    manifest: ProgramManifest
    tokenizer: Tokenizer
    inference: Inference

    @property
    def context(self) -> int:
        """Tokens that a text and its continuation may have."""
        return self.manifest.inference_context or 0

    def close(self) -> None:
        """Frees the program's memory."""
        self.inference.close()


def open_personal(home: Home, name: str, *, base: bool = False) -> PersonalModel:
    """The newest adapter of a name, loaded. base: the base model without it, to compare.

    Raises NotFound if the adapter or a file of its program is not here, Untrusted, BadRequest, RuntimeFailed.
    """
    opened = AdapterShelf(home).open(name, *home.config().trusted_keys())
    absent = [file.role for file in missing(home, opened.about)]
    if absent:
        raise NotFound(
            f"the {' and '.join(absent)} of {name!r} are not on this device; "
            f"`mobizo-agent adapters pull {name}` fetches what its use needs while the server can be reached"
        )
    cache, manifest = FileCache(home.cache), opened.manifest
    if manifest.inference_context is None:
        raise BadRequest(f"a program of backend {manifest.recipe.backend} has no inference file; use xnnpack")
    files = (cache.path(manifest.file("inference")), cache.path(manifest.file("weights")))
    inference = open_inference(manifest, *files, local_runner(home))
    if not base:
        inference.load(opened.flat)
    tokenizer = Tokenizer.from_file(str(cache.path(manifest.file("tokenizer"))))
    return PersonalModel(name, opened.about.task, manifest, tokenizer, inference)


def missing(home: Home, about: KeptAdapter) -> list[ProgramFile]:
    """What an adapter's use needs and the cache lacks."""
    cache = FileCache(home.cache)
    return [file for file in about.files if not cache.holds(file)]
