"""Programs that a whole test run compiles once, whichever of its workers needs one first.

They lie in the run's own temporary directory, so that none outlives the code that made it. Knows no base and no
fixture.
"""

import fcntl
import functools
import os
import shutil
import warnings
from contextlib import contextmanager

from shared.program import ProgramManifest

MANIFEST = "manifest.json"


@contextmanager
def held(path):
    """The lock of a file, one process at a time; it falls with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class ProgramStore:
    """What was compiled in this run, by recipe: that names the base's bytes."""

    def __init__(self, directory):
        """directory: the same one for all workers of a run."""
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def put(self, recipe, source, directory, inference=True):
        """Puts a program's files into `directory`, compiled in this process if nobody did; its manifest.

        inference: with the file for inference, which takes as long again.
        """
        kept = self.compiled(recipe, source, inference)
        shutil.copytree(kept, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        return ProgramManifest.model_validate_json((kept / MANIFEST).read_bytes())

    def compiled(self, recipe, source, inference=True):
        """The same where it lies, for files too large to copy: to be read only."""
        kept = self.directory / f"{recipe.id}-{'whole' if inference else 'training'}"
        with held(kept.with_suffix(".lock")):
            if not kept.exists():
                making = kept.with_suffix(".making")
                shutil.rmtree(making, ignore_errors=True)
                making.mkdir()
                with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations
                    warnings.simplefilter("ignore")
                    from server.compiler import compile_program

                    list_operators_once()
                    manifest = compile_program(recipe, str(source), making, inference=inference)
                (making / MANIFEST).write_text(manifest.model_dump_json())
                making.rename(kept)
        return kept


def list_operators_once():
    """An export looks up every operator that torch's libraries have, a seventh of its time; they stay what they are."""
    from torch._export import utils

    if not hasattr(utils._materialize_cpp_cia_ops, "cache_info"):
        utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


def run_directory(tmp_path_factory):
    """A directory that all workers of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
