"""The real compiler as a process for the servers of tests, which takes from the tests' cache what that has.

Command line and output are those of `python -m server.compiler`, which does the work where the cache has no program.
"""

import json
import os
import sys
from pathlib import Path

from server.compiler.worker_protocol import Lines
from shared.recipe import Recipe
from tests.programs import ROOT, shared_store

INFERENCE = "MOBIZO_TEST_INFERENCE"  # empty: programs have no file for inference


def environment(inference=True):
    """Returns the variables by which a server's workers compile with this module.

    inference: whether programs have the file for inference, which takes longer to compile than the other files.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "tests.cached_compiler"]
    return {
        "MOBIZO_COMPILER_COMMAND": json.dumps(command),
        "PYTHONPATH": os.pathsep.join(paths),
        INFERENCE: "1" if inference else "",
    }


def wants_inference():
    """Returns whether programs have the file for inference."""
    return os.environ.get(INFERENCE, "1") != ""


def main(arguments):
    """Compiles as the arguments say; returns the exit code."""
    recipe_path, source, out_dir, *_ = arguments
    recipe = Recipe.model_validate_json(Path(recipe_path).read_bytes())
    if shared_store().has(recipe, source, wants_inference()):  # torch need not be loaded
        manifest = shared_store().put(recipe, source, Path(out_dir), wants_inference())
        Lines().say({"manifest": manifest.model_dump(mode="json")})
        return 0
    from server.compiler import __main__ as compiler

    compiler.compile_program = compile_into_cache
    return compiler.main(arguments)


def compile_into_cache(recipe, source, out_dir, progress, *, calibration, kept):  # it keeps its own
    """Does what `compile_program` does, by the cache."""
    return shared_store().put(recipe, source, out_dir, wants_inference(), calibration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
