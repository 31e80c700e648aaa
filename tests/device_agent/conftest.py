"""A tiny random Llama compiled by the real compiler, data that the tiny tokenizer knows, and agents' homes."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from device_agent.cli.app import app
from device_agent.cli.main import main
from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display
from device_agent.executors.python import PythonLauncher
from device_agent.executors.runner import RunnerLauncher
from device_agent.home import AgentHome, DeviceConfig
from device_agent.runner.location import RUNNER_VARIABLE
from device_agent.training.data import read_splits
from device_agent.training.run_directory import RunDirectory
from device_agent.training.run_plan import RunPlan
from server.compiler.checkpoints.base import locate_base
from shared.canonical import sha256_hex
from shared.program import ProgramManifest
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.signing import key_id, new_private_key, public_text
from shared.task_templates import named_task
from shared.training_settings import TrainingSettings
from tests.device_agent.fake_server import DEVICE_KEYS, FakeServer
from tests.device_agent.native import ROOT as ROOT
from tests.device_agent.native import built_runner
from tests.device_agent.service import RECIPE, call, environment, service, service_home  # noqa: F401  # fixtures
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

    def splits(self, dataset, settings):
        return read_splits(dataset, TASK, self.tokenizer, self.manifest.recipe, settings, noise_key=NOISE_KEY)


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


@pytest.fixture(autouse=True)
def plain_logs():
    """Log lines as structlog prints them by itself, whatever tests before these told it."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


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


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a size such as 2m; returns its path. Skips where that is not allowed."""
    mounted = []

    def mount(size):
        path = tmp_path / f"disk-{size}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root can mount a disk")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="session")
def runner_directory():
    """The installed native runner: mobizo-runner, and lib/ beside it."""
    return built_runner()


@pytest.fixture
def launcher(request):
    """What runs a daemon's programs: the native runner, which starts in a moment, or Python if a test asks for it.

    What a daemon sees is the same by either: the executors' own contract holds them to that.
    """
    if getattr(request, "param", "native") == "python":
        return PythonLauncher()
    return RunnerLauncher(request.getfixturevalue("runner_directory"))


@pytest.fixture
def launchers(launcher):
    """Selects the launcher for every program."""
    return lambda _manifest: launcher


@pytest.fixture
def without_runner(monkeypatch, tmp_path):
    """No native runner is found."""
    monkeypatch.setenv(RUNNER_VARIABLE, str(tmp_path / "no-runner"))


@pytest.fixture
def server_key():
    return new_private_key()


@pytest.fixture
def home(tmp_path):
    """A home that has been made but not enrolled."""
    place = AgentHome(tmp_path / "home")
    place.create()
    return place


@pytest.fixture
def server(server_key):
    """A server in memory; `service` is the real one."""
    with FakeServer(server_key) as double:
        yield double


@pytest.fixture
def enrolled(home, server, server_key):
    """The home, enrolled with the server."""
    enroll(home, server.url, server_key)
    return home


@pytest.fixture
def make(dataset, launchers):
    """Makes a daemon of any home."""
    daemons = []

    def make(home, data=None, **options):
        display = Display(home)
        display.__enter__()
        options = {"pause_seconds": 0.1, "launchers": launchers} | options
        daemons.append(Daemon(home, data or {"movies": dataset}, display, **options))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def daemon(make, enrolled):
    return make(enrolled)


@pytest.fixture
def in_background():
    """Runs a daemon in a thread beside the test, and stops it after; returns the thread and a list for its end."""
    threads = []

    def begin(daemon, once=False):
        ends = []
        thread = threading.Thread(target=lambda: ends.append(daemon.run(once)))
        threads.append((daemon, thread))
        thread.start()
        return thread, ends

    yield begin
    for daemon, thread in threads:
        daemon.stop()
        thread.join(60)
        assert not thread.is_alive()


def run_agent(home, *arguments, before=(), **options):
    """Runs `mobizo-agent` to its end in a home. before: the words of a command that runs it."""
    return subprocess.run(
        [*before, sys.executable, "-m", "device_agent", *arguments],
        cwd=ROOT,
        env=os.environ | {"MOBIZO_AGENT_HOME": str(home.path)},
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.fixture
def agent(home):
    """Runs `mobizo-agent` to its end in the test's home."""
    return lambda *arguments, **options: run_agent(home, *arguments, **options)


@pytest.fixture
def invoke(home):
    """Runs `mobizo-agent` in this process, in the test's home; returns its output."""

    def invoke(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments), "--home", str(home.path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


@pytest.fixture
def refused(home, monkeypatch, capsys):
    """Runs `mobizo-agent` in this process to an error, in the test's home; returns exit status and standard error."""

    def refused(*arguments):
        monkeypatch.setenv("MOBIZO_AGENT_HOME", str(home.path))
        monkeypatch.setattr(sys, "argv", ["mobizo-agent", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert output.out == ""
        return ended.value.code, output.err

    return refused


def start_agent(home, *arguments, notify=None, **options):
    """Starts `mobizo-agent` in a home. notify: where systemd hears it."""
    command = [sys.executable, "-u", "-m", "device_agent", *arguments]
    variables = os.environ | {"MOBIZO_AGENT_HOME": str(home.path)} | (notify or {})
    return subprocess.Popen(command, cwd=ROOT, env=variables, **options)


@pytest.fixture
def start_run(enrolled, dataset):
    """Starts `mobizo-agent run` in the enrolled home; what of it still runs after the test is killed."""
    processes, null = [], subprocess.DEVNULL

    def start(*options, notify=None):
        command = ("run", *options, "--data", f"movies={dataset}", "--json")
        pipes = {"stdout": null, "stderr": null, "start_new_session": True}
        processes.append(start_agent(enrolled, *command, notify=notify, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def enroll(home, url, server_key, token="device-token"):
    """Puts a home in the state that enrollment leaves it in."""
    public, own = server_key.public_key(), home.device_key().public_key()
    DEVICE_KEYS.setdefault(url, {})[key_id(own)] = own
    home.enroll(
        DeviceConfig(
            server=url,
            name="device",
            device_id="device-1",
            token=token,
            public_key=public_text(public),
            key_id=key_id(public),
        )
    )


def copy_run(source, target):
    shutil.copytree(source.path, target)
    return RunDirectory(target)
