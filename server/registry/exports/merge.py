"""A base model with an adapter merged into its weights: a Hugging Face directory that needs no PEFT.

W + (alpha / r) (A B)^T in float32, tensor by tensor, so that no more than one weight file is in memory; what the base
stored in fewer bits is written in float32, too, since rounding it again would lose what was learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy

from server.compiler.checkpoints.base import BaseFiles, locate_base
from server.compiler.checkpoints.hf import PREFIX
from server.compiler.checkpoints.transformers_names import stock_tensors, write_stock_files
from server.registry.exports.frozen_a import delta, joined
from server.registry.exports.service import SHARD_BYTES
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, UnsupportedModel
from shared.protocol import PeftFile
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def merge(
    recipe: Recipe,
    shape: BaseShape,
    flat: F32,
    a_sha256: str,
    source: str,
    directory: Path,
    report: Callable[[str, float], None] = lambda stage, fraction: None,
    shard_bytes: int = SHARD_BYTES,
    calibration: Calibration | None = None,
) -> list[PeftFile]:
    """Writes the merged model of the base at `source` into `directory`, made here, and returns its files by name.

    flat: B, float32 (D,). a_sha256: fingerprint of the A that B was trained with. report: told a stage's name and its
    fraction done. calibration: the one that the recipe names, if it names one. Raises BaseMismatch, AMismatch,
    InvalidUpload, InvalidRecipe without the calibration, UnknownBase, UnreadableCheckpoint or UnsupportedModel.
    """
    report("read", 0.0)
    adapted = {_plain(module.name): (a, b) for module, a, b in joined(recipe, shape, flat, a_sha256, calibration)}
    files = locate_base(source)
    refuse_other_base(recipe, files)
    directory.mkdir()
    write_stock_files(files, directory)
    shards = _Shards(directory, shard_bytes)
    count = len(adapted)
    for name, weight in stock_tensors(files):
        stem, _, ending = name.rpartition(".")
        matrices = adapted.pop(_plain(stem), None) if ending == "weight" else None
        if matrices is None:
            shards.add(name, weight)
            continue
        shards.add(name, weight + delta(recipe, *matrices))
        report("merge", 1 - len(adapted) / count)
    if adapted:
        raise UnsupportedModel(f"the base has no weight {next(iter(adapted))}, which the adapter changes")
    shards.close()
    return [
        PeftFile(path=path.name, size=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(directory.iterdir())
    ]


def refuse_other_base(recipe: Recipe, files: BaseFiles) -> None:
    """Raises BaseMismatch if these are not the files of the recipe's base."""
    if (sha256 := files.sha256) != recipe.base.sha256:
        raise BaseMismatch(
            f"the adapter was trained on {recipe.base.name!r} of sha256 {recipe.base.sha256[:12]}..., and the files "
            f"at its place have {sha256[:12]}... by now"
        )


def _plain(name: str) -> str:
    """A module's name without the wrappers that a checkpoint may leave out."""
    return PREFIX.sub("", name, count=1)


class _Shards:
    """Weight files of at most so many bytes each, and their index if there are several."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        self._tensors: dict[str, F32] = {}
        self._written: list[list[str]] = []  # names of each file's tensors
        self._total = 0

    def add(self, name: str, tensor: F32) -> None:
        """Takes the next tensor; writes a file if it would be too large."""
        if self._tensors and sum(each.nbytes for each in self._tensors.values()) + tensor.nbytes > self._most_bytes:
            self._write()
        self._tensors[name] = np.ascontiguousarray(tensor)
        self._total += tensor.nbytes

    def close(self) -> None:
        """Writes what is left, and gives the files their final names."""
        self._write()
        if len(self._written) == 1:
            self._path(1).rename(self._directory / ONE_FILE)
            return
        places: dict[str, str] = {}
        for number, names in enumerate(self._written, 1):
            final = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            self._path(number).rename(self._directory / final)
            places |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write(self) -> None:
        self._written.append(sorted(self._tensors))
        safetensors.numpy.save_file(self._tensors, self._path(len(self._written)), metadata={"format": "pt"})
        self._tensors = {}

    def _path(self, number: int) -> Path:
        return self._directory / f"part-{number}.safetensors"
