"""`mobizo-server calibrate` and `calibrations` on a real tiny model; `compile --calibration` with a fake compiler."""

import json

import pytest

from server.compiler.checkpoints.base import locate_base
from server.programs import local as local_compilation
from shared.canonical import sha256_hex
from shared.errors import (
    BadRequest,
    InvalidDataset,
    InvalidRecipe,
    InvalidTask,
    InvalidUpload,
    NotFound,
    UnknownBase,
)
from shared.zo.calibration import load_calibration, read_calibration
from tests.server.cli.conftest import call
from tests.server.cli.test_compile import SMALL, write_recipe

TEXTS = ("a very good film", "a bad film", "very bad", "good x", "a film", "x very film", "bad x a", "good good film")
RECORDS = [{"text": text, "label": "negative" if "bad" in text else "positive"} for text in TEXTS]


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No home of the machine's own is looked into."""
    monkeypatch.setenv("MOBIZO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def recipe(tmp_path):
    """Writes the recipe that `arguments` name."""

    def recipe(**settings):
        write_recipe(tmp_path / "recipe.json", **{"rank": 2} | settings)

    recipe()
    return recipe


@pytest.fixture
def arguments(llama, data, tmp_path, recipe):
    options = ("--task", "sst2", "--data", data, "--recipe", tmp_path / "recipe.json", "--to", tmp_path / "made")
    return ["calibrate", "--base", llama, *options]


def test_a_file_and_its_figures(arguments, recipe, llama, tmp_path):
    recipe(layers="last:1", loss="candidates")
    figures = json.loads(call(*arguments, "--json"))
    calibration = read_calibration(tmp_path / "made")
    assert figures.pop("seconds") >= 0
    assert figures == {
        "sha256": sha256_hex((tmp_path / "made").read_bytes()),
        "base": "llama",
        "base_sha256": locate_base(str(llama)).sha256,
        "kind": "gradients",
        "task": "sst2",
        "examples": len(RECORDS),
        "modules": 2,
        "width": 2,
        "balanced": False,
        "bytes": (tmp_path / "made").stat().st_size,
    }
    assert {name: value.shape for name, value in calibration.directions.items()} == {
        "model.layers.1.self_attn.q_proj": (16, 2),
        "model.layers.1.self_attn.v_proj": (16, 2),
    }
    assert json.loads(call(*arguments, "--balance", "--json"))["balanced"] is True
    assert read_calibration(tmp_path / "made").metadata.scales.keys() == calibration.directions.keys()
    assert "--balance: needs --kind gradients" in call(*arguments, "--kind", "activations", "--balance", code=2)


def test_kinds_and_numbers_of_examples(arguments, recipe, tmp_path):
    directions = set()
    for options in ([], ["--examples", 4], ["--kind", "activations"], None):
        if options is None:
            recipe(loss="candidates")
            options = []
        assert "sha256: " in call(*arguments, *options)
        calibration = read_calibration(tmp_path / "made")
        assert calibration.metadata.examples == (4 if "--examples" in options else len(RECORDS))
        directions.add(calibration.directions["model.layers.0.self_attn.q_proj"].tobytes())
    assert len(directions) == 4


def test_a_task_of_ones_own(arguments, recipe, tmp_path):
    answers = [{"text": " {yes}", "labels": ["positive"]}, {"text": " bad", "labels": ["negative"]}]
    task = {"name": "mine", "prompt": "{text}", "answers": answers}
    (tmp_path / "task.json").write_text(json.dumps(task))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record | {"yes": "good"}) + "\n" for record in RECORDS))
    arguments[arguments.index("sst2")] = tmp_path / "task.json"
    with pytest.raises(InvalidTask, match="answers from the record"):
        call(*arguments)
    recipe(answer_length=1, choices=2)
    call(*arguments)
    assert read_calibration(tmp_path / "made").metadata.task == "mine"


def test_what_cannot_be_made(arguments, recipe, llama, data, tmp_path):
    def assert_refused(error, message, **changes):
        # The last of an option that is given twice counts.
        with pytest.raises(error, match=message):
            call(*arguments, *(word for option, value in changes.items() for word in (f"--{option}", value)))
        assert not (tmp_path / "made").exists()

    bad = tmp_path / "bad.jsonl"
    bad.write_text(data.read_text() + '{"text": "x"}\n')
    assert_refused(InvalidDataset, r"bad\.jsonl:9: field 'label'", data=bad)
    assert_refused(InvalidDataset, r"nothing\.jsonl: cannot be read", data=tmp_path / "nothing.jsonl")
    assert_refused(InvalidTask, "there is no built-in task 'sst3'", task="sst3")
    bad.write_text("{}")
    assert_refused(InvalidTask, "not a valid task", task=bad.rename(tmp_path / "bad.json"))
    assert_refused(UnknownBase, "neither a local directory", base="no such model")
    assert_refused(BadRequest, "cannot be written", to=tmp_path / "no" / "place")
    assert "--kind" in call(*arguments, "--kind", "weights", code=2)
    recipe(layers="last:3")
    assert_refused(InvalidRecipe, "2 layers")
    recipe(rank=16)
    assert_refused(InvalidDataset, "fewer than 16 directions", examples=1)
    recipe(targets=["lm_head"])
    assert_refused(InvalidRecipe, "targets")


def test_a_home_and_its_calibrations(arguments, llama, tmp_path):
    call("init")
    call("base", "add", "tiny", llama)
    arguments[arguments.index("--base") + 1] = "tiny"
    file = json.loads(call(*arguments, "--json"))
    assert file["base"] == "tiny"
    added = json.loads(call("calibration", "add", tmp_path / "made", "--json"))
    assert (added["sha256"], added["base"], added["modules"], added["width"]) == (file["sha256"], "tiny", 4, 2)
    assert [row["sha256"] for row in json.loads(call("calibration", "list", "--json"))] == [file["sha256"]]
    assert "gradients" in call("calibration", "list")
    with pytest.raises(BadRequest, match="cannot be read"):
        call("calibration", "add", tmp_path / "nothing")
    with pytest.raises(InvalidUpload):
        call("calibration", "add", tmp_path / "data.jsonl")
    assert file["sha256"] in call("calibration", "remove", file["sha256"][:10])
    assert json.loads(call("calibration", "list", "--json")) == []
    with pytest.raises(NotFound):
        call("calibration", "remove", file["sha256"])


def test_a_program_takes_a_from_it(tmp_path, monkeypatch, arguments, source):
    call(*arguments)
    calibration = load_calibration((tmp_path / "made").read_bytes())
    compiler_calls = []

    def stop(self, recipe, source, workspace, calibration):
        compiler_calls.append((recipe.calibration, calibration))
        raise BadRequest

    monkeypatch.setattr(local_compilation.CompilerProcess, "run", stop)
    file = write_recipe(tmp_path / "small.json", **SMALL)
    compile_ = ["compile", "--base", source, "--recipe", file, "--to", tmp_path / "out"]
    for options in ([], ["--calibration", tmp_path / "made"]):
        with pytest.raises(BadRequest):
            call(*compile_, *options)
    assert compiler_calls == [(None, None), (calibration.sha256, (tmp_path / "made").read_bytes())]
    with pytest.raises(InvalidUpload, match="cannot be read"):
        call(*compile_, "--calibration", tmp_path / "nothing")
