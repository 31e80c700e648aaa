"""Compiled programs that tests share, kept across test runs.

A program is a pure function of the compiler's sources, the libraries it uses, the recipe and the base. The cache key
covers all four, so that a cached program is never older than the code under test.
"""

import ast
import fcntl
import functools
import gc
import hashlib
import os
import shutil
import time
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from server.compiler.checkpoints.base import locate_base
from shared.program import ProgramManifest

ROOT = Path(__file__).resolve().parents[1]
COMPILER = Path("server/compiler")
PACKAGES = ("server", "shared")
LIBRARIES = ("torch", "executorch", "torchao", "numpy", "safetensors", "tokenizers", "transformers", "gguf")
MANIFEST = "manifest.json"
CACHE_VARIABLE = "MOBIZO_TEST_CACHE"
KEPT_STATES, KEPT_SECONDS = 2, 3600  # source states that are kept whatever their age; how long others are kept


def cache_directory():
    """Returns the directory of what tests keep across runs: MOBIZO_TEST_CACHE, or one below pytest's own cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or ROOT / ".pytest_cache" / "mobizo")


@contextmanager
def held(path):
    """Holds the lock of a file, one process at a time; the lock ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiler_sources(root=ROOT):
    """Returns the files below `root` that decide what the compiler makes, sorted.

    They are all files of the compiler's package and every module of `server` and `shared` that these import, directly
    or through others, with the packages around them.
    """
    found = {path for path in (root / COMPILER).rglob("*") if path.is_file() and path.suffix != ".pyc"}
    waiting = [path for path in found if path.suffix == ".py"]
    while waiting:
        for path in _imported(root, waiting.pop()) - found:
            found.add(path)
            waiting.append(path)
    return sorted(found)


def _imported(root, source):
    """Returns the project's files that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = source.relative_to(root).parent.parts
            above = package[: len(package) - node.level + 1] if node.level else ()
            names.update(".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)
    files = set()
    for name in names:
        parts = name.split(".")
        if parts[0] in PACKAGES:
            for length in range(1, len(parts) + 1):
                place = root.joinpath(*parts[:length])
                files.update({place.with_suffix(".py"), place / "__init__.py"})
    return {path for path in files if path.is_file()}


def source_state(root=ROOT):
    """Returns the hash that names the compiler's sources below `root` and the versions of its libraries."""
    digest = hashlib.sha256()
    for path in compiler_sources(root):
        digest.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()


class ProgramStore:
    """Programs that were compiled by the present sources. Any number of processes may use one directory."""

    def __init__(self, directory, state=None):
        """directory: the same one for all processes. state: names the sources; by default those of this tree."""
        self.directory = directory / (state or source_state())[:32]
        self.directory.mkdir(parents=True, exist_ok=True)
        os.utime(self.directory)

    def put(self, recipe, source, directory, inference=False, calibration=None):
        """Copies a program's files into `directory`, compiled first unless the cache has them; returns the manifest.

        inference: with the file for inference, which takes several times as long to compile as the other files.
        calibration: the one that the recipe names, if it names one.
        """
        kept = self.compiled(recipe, source, inference, calibration)
        shutil.copytree(kept, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        return ProgramManifest.model_validate_json((kept / MANIFEST).read_bytes())

    def compiled(self, recipe, source, inference=False, calibration=None):
        """Returns the cache's own directory of a program, which is to be read only: for files too large to copy."""
        kept = self.directory / self.key(recipe, source, inference)
        if not kept.exists():
            with held(kept.with_suffix(".lock")):
                if not kept.exists():
                    self._compile(kept, recipe, source, inference, calibration)
        return kept

    def has(self, recipe, source, inference=False):
        """Returns whether a program need not be compiled."""
        return (self.directory / self.key(recipe, source, inference)).exists()

    def key(self, recipe, source, inference=False):
        """Returns the name of a program in the cache. A recipe names its calibration by sha256."""
        base = locate_base(str(source)).sha256
        return f"{recipe.id[:24]}-{base[:16]}-{'whole' if inference else 'training'}"

    def _compile(self, kept, recipe, source, inference, calibration):
        making = kept.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations
            warnings.simplefilter("ignore")
            from server.compiler.program import compile_program

            list_operators_once()
            gc.disable()  # it would walk through the many small objects of the graphs again and again
            try:
                manifest = compile_program(
                    recipe,
                    str(source),
                    making,
                    inference=inference,
                    calibration=calibration,
                    kept=self.directory / "lowered",
                )
            finally:
                gc.enable()
        (making / MANIFEST).write_text(manifest.model_dump_json())
        making.rename(kept)


@functools.cache
def shared_store():
    """Returns the store of this source tree."""
    return ProgramStore(cache_directory() / "programs")


def remove_unused(directory):
    """Removes the programs of source states that were not used lately, except for the last few."""
    states = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    states.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in states[KEPT_STATES:]:
        if path.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def list_operators_once():
    """Caches the list of all operators that torch's libraries have: each export looks it up, a seventh of its time."""
    from torch._export import utils

    if not hasattr(utils._materialize_cpp_cia_ops, "cache_info"):
        utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


def run_directory(tmp_path_factory):
    """Returns a directory that all workers of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
