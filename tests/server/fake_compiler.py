"""A compiler for tests of what surrounds the compiler: same command line, same output, a tiny program in no time.

A base's source is a directory with `shape.json`; `behaviour.json` in it makes the compiler slow, fail, crash or hang.
Every start is a line of `starts.log`, so that tests can count compilations.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from shared.canonical import file_sha256
from shared.program import ProgramFile, ProgramManifest
from shared.recipe import REVERSE_ESTIMATORS, Recipe
from shared.zo.calibration import Calibration, read_calibration
from shared.zo.lora import BaseShape, a_fingerprint, flat_size


def build(recipe: Recipe, source: Path, out_dir: Path, calibration: Calibration | None = None) -> ProgramManifest:
    shape = BaseShape.model_validate_json((source / "shape.json").read_text())
    out_dir.mkdir()
    contents = {
        "program": ("program.pte", f"program of {recipe.id}".encode() * 100),
        "weights": ("weights.ptd", bytes(range(256)) * 1000),
        "tokenizer": ("tokenizer.json", (source / "tokenizer.json").read_bytes()),
    }
    files = []
    for role, (name, data) in contents.items():
        path = out_dir / name
        path.write_bytes(data)
        files.append(ProgramFile(role=role, name=name, size=len(data), sha256=file_sha256(path)))
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=shape,
        size=flat_size(recipe, shape),
        a_sha256=a_fingerprint(recipe, shape, calibration),
        score_rows=recipe.score_rows,
        files=tuple(files),
        # A reverse pass keeps the inputs of all layers.
        planned_bytes=(512 if recipe.estimator in REVERSE_ESTIMATORS else 32)
        * recipe.score_rows
        * recipe.sequence_length
        * shape.hidden,
        flops_per_step=1000,
        delegates=1,
        nodes=10,
        executorch="1.5.1",
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    recipe_path, source, out_dir, *rest = (Path(argument) for argument in sys.argv[1:])
    behaviour_path = source / "behaviour.json"
    behaviour = json.loads(behaviour_path.read_text()) if behaviour_path.exists() else {}
    with (source / "starts.log").open("a") as log:  # whoever sees it may change the behaviour of the next
        log.write(f"{os.getpid()}\n")
    say(json.dumps({"stage": "read", "fraction": 0.0}))
    say("a line that is not JSON")
    time.sleep(behaviour.get("seconds", 0))
    if behaviour.get("hang"):
        time.sleep(600)
    if behaviour.get("memory"):
        hold = bytearray(os.urandom(1 << 20) * behaviour["memory"])
        time.sleep(600)
        del hold
    if behaviour.get("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if "error" in behaviour:
        say(json.dumps({"error": behaviour["error"]}))
        return 1
    recipe = Recipe.model_validate_json(recipe_path.read_text())
    manifest = build(recipe, source, out_dir, read_calibration(rest[0]) if rest else None).model_dump(mode="json")
    if "tamper" in behaviour:
        (out_dir / "program.pte").write_bytes(b"something else")
    say(json.dumps({"manifest": manifest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
