"""A tiny random Llama compiled by the real compiler, and data that its tokenizer knows."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from device_agent.training.data import read_splits
from device_agent.training.run_plan import RunPlan
from server.compiler.checkpoints.base import locate_base
from shared.canonical import sha256_hex
from shared.program import ProgramManifest
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from tests.device_agent.service import RECIPE
from tests.server.llama import write_model

VOCABULARY = 288
WORDS = ("warm", "funny", "dull", "tedious", "film", "plot", "cast", "joy", "bore", "bright", "flat", "weak")
TASK = named_task("sst2")
NOISE_KEY = sha256_hex(b"a device")


def write_base(directory, **changes):
    """A random Llama in the Hugging Face form, with a byte-level tokenizer. changes: of its configuration."""
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    write_model(directory, config | changes, 0.3)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["It was terrible", "It was great"] * 50, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


@dataclass(frozen=True)
class Program:
    """A compiled program in a directory."""

    directory: Path
    manifest: ProgramManifest

    def path(self, role):
        return self.directory / self.manifest.file(role).name

    @property
    def tokenizer(self):
        return Tokenizer.from_file(str(self.path("tokenizer")))

    def plan(self, dataset, job_id="job-1", **training):
        return RunPlan(
            job_id=job_id,
            task=TASK,
            training=TrainingSettings(**training),
            manifest=self.manifest,
            dataset=dataset,
            program=self.path("program"),
            weights=self.path("weights"),
            tokenizer=self.path("tokenizer"),
            noise_key=NOISE_KEY,
        )

    @property
    def files(self):
        """The program and its weights."""
        return self.path("program"), self.path("weights")

    def examples(self, dataset):
        """The training examples of a data set."""
        return self.splits(dataset, TrainingSettings()).train

    def splits(self, dataset, settings, task=TASK, recipe=None, **options):
        options = {"noise_key": NOISE_KEY} | options
        return read_splits(dataset, task, self.tokenizer, recipe or self.manifest.recipe, settings, **options)


class TinyCompiler:
    """Compiles tiny recipes of the base, each once in the whole test run, into directories of this process's own."""

    def __init__(self, base, store, directories):
        self._base, self._store, self._directories = base, store, directories

    def __call__(self, name, inference=False, **settings):
        """Returns the program of a recipe. name: of its directory. inference: with the file for inference."""
        recipe = Recipe(
            base=BaseRef(name="tiny", sha256=locate_base(str(self._base)).sha256),
            **RECIPE | {"choices": 2} | settings,
        )
        directory = self._directories.mktemp(name)
        return Program(directory, self._store.put(recipe, self._base, directory, inference))


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "tiny"
    write_base(directory)
    return directory


@pytest.fixture(scope="session")
def compile_tiny(base, program_store, tmp_path_factory):
    return TinyCompiler(base, program_store, tmp_path_factory)


@pytest.fixture(scope="session")
def rademacher(compile_tiny):
    """The one program of these that has a file for inference."""
    return compile_tiny("rademacher", inference=True)


@pytest.fixture(scope="session")
def gaussian(compile_tiny):
    return compile_tiny("gaussian", noise="gaussian", loss="candidates")


@pytest.fixture(scope="session")
def stored(compile_tiny):
    """It has prefix and suffix."""
    return compile_tiny("stored", estimator="stored", loss="candidates", layers="last:1")


@pytest.fixture(scope="session")
def directional(compile_tiny):
    """It has prefix and suffix, computes its examples in two micro-batches, and loops over its directions."""
    settings = {"targets": TARGETS, "rank": 16, "queries": 512, "micro_batch": 2}
    return compile_tiny("directional", estimator="directional", loss="candidates", layers="last:1", **settings)


SLOW_PROGRAMS = [pytest.param(name, marks=pytest.mark.slow) for name in ("gaussian", "stored", "directional")]


@pytest.fixture(params=["rademacher", *SLOW_PROGRAMS])
def program(request):
    """One program per noise, one per estimator; between them, both losses, with and without a prefix."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def clipped(compile_tiny):
    """For private runs by finite differences."""
    return compile_tiny("clipped", privacy="clipped", layers="last:1", effective_batch=2)


@pytest.fixture(scope="session")
def gradient(compile_tiny):
    return compile_tiny("gradient", estimator="gradient", loss="candidates", layers="last:1", queries=1)


def write_records(path, count, seed, marker=""):
    """Random sentences with balanced labels."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for index in range(count):
            text = " ".join([f"{marker}{index}" if marker else "the", *rng.sample(WORDS, 3)])
            file.write(json.dumps({"text": text, "label": ("negative", "positive")[index % 2]}) + "\n")


def write_dataset(directory):
    """A data set's directory with all three splits."""
    directory.mkdir()
    for seed, (split, count) in enumerate((("train", 13), ("validation", 9), ("test", 7))):
        write_records(directory / f"{split}.jsonl", count, seed)
    return directory


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "movies")
