"""`mobizo quickstart`: invalid input is refused before anything starts; complete runs on a tiny base."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from device_agent.datasets.formats import Format
from device_agent.home import AgentHome
from mobizo.quickstart.data import FileOptions, check_data
from mobizo.quickstart.run import Options, _job_request, quickstart
from shared.catalog import BaseView
from shared.errors import BadRequest, InvalidDataset
from tests import cached_compiler
from tests.device_agent.tiny import WORDS, write_base

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-c", "from mobizo.cli import main; main()", "quickstart"]


def write_csv(path, count, header="text;label", labels=("dull", "bright")):
    lines = [f"the {WORDS[number % 7]} film {number};{labels[number % len(labels)]}" for number in range(count)]
    path.write_text("\n".join([header, *lines]))
    return path


def check(path, *fields, home=None, **options):
    """Checks a file for an empty home, or for one that has data."""
    agent_home = AgentHome((home or path.parent / "empty") / "agent")
    return check_data(FileOptions(path, fields, **options), agent_home)


@pytest.fixture
def records(tmp_path):
    return write_csv(tmp_path / "My reviews.csv", 80)


def test_a_task_is_made_from_the_labels(records, tmp_path):
    data = check(records)
    assert (data.addition.name, data.suggested) == ("my-reviews", True)
    assert data.task.prompt == "label: bright, dull\n{text}\nlabel:"
    assert [(answer.text, answer.labels) for answer in data.task.answers] == [
        (" bright", ("bright",)),
        (" dull", ("dull",)),
    ]
    assert (data.check.fitting, data.check.suggested) == (80, 32)
    mapped = write_csv(tmp_path / "b.csv", 60, "says;is it {good}?", ("0", "1", "2"))
    data = check(mapped, "text=says", "label=is it {good}?")
    assert data.task.prompt == "is it {{good}}?: 0, 1, 2\n{text}\nis it {{good}}?:"
    assert data.check.fitting == 60
    long = write_csv(tmp_path / "long.csv", 80, labels=("a" * 30, "b" * 30))  # a list would cost too many tokens
    assert check(long).task.prompt == "{text}\nlabel:"
    sentiment = write_csv(tmp_path / "c.csv", 4, labels=("negative", "positive"))  # too few for three splits
    data = check(sentiment, task="sst2")
    assert (data.task.name, data.suggested) == ("sst2", False)
    assert data.addition.rule.shares != (80, 10, 10)
    assert not list(tmp_path.glob("*/"))  # nothing was written


@pytest.mark.parametrize(("labels", "batch"), [(2, 8), (16, 16)])
def test_a_batch_has_a_row_for_every_answer(tmp_path, labels, batch):
    path = write_csv(tmp_path / "a.csv", 160, labels=tuple(f"class number {number}" for number in range(labels)))
    base = BaseView.model_construct(name="base", parameters=1_000_000, layers=30, context_length=2048)
    request = _job_request(base, check(path), Options("base", FileOptions(path), tmp_path))
    assert request.recipe.effective_batch == batch  # the server refuses fewer rows than answers of several tokens


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "A long day."}, "text"),
        ({"prompt": "Two and two?", "answer": "Four, I believe."}, "completion"),
        ({"prompt": "Two and two?", "completion": "Four, I believe."}, "completion"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, "messages"),
        ({"prompt": "Two and two?", "chosen": "Four, I think.", "rejected": "What?"}, "preference"),
    ],
)
def test_records_without_labels_teach_to_write(tmp_path, record, kind):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(record | {"number": number}) + "\n" for number in range(40)))
    with path.open("a") as file:
        file.write(path.read_text().splitlines(keepends=True)[0])
    data = check(path)
    assert (data.task.kind, data.suggested, data.check.fitting, data.duplicates) == (kind, True, 40, 1)
    assert data.check.suggested_answer == (8 if kind in ("completion", "preference") else None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base": "no/such/base"}, BadRequest, "does not exist"),
        ({"base": "."}, BadRequest, "neither a .gguf file nor a directory"),
        ({"data": Path("missing.csv")}, BadRequest, "is not a file"),
        ({"data": "one-column"}, BadRequest, "the first row has one column, and each of the next 20 rows has 2"),
        ({"data": "untold"}, BadRequest, "no column 'text'"),
        ({"data": "many"}, BadRequest, "has 40 different labels"),
        ({"fields": ("text",)}, BadRequest, "--map 'text' must be FIELD="),
        ({"fields": ("text=x", "label=y")}, InvalidDataset, "no column 'x'"),
        ({"data": "header"}, InvalidDataset, "header.csv has no records; a table needs rows below"),
        ({"data": "empty"}, InvalidDataset, "empty.csv has no records"),
        ({"data": "blank"}, InvalidDataset, "column 'text' of .*blank.csv is blank"),
        ({"data": "unlabelled"}, BadRequest, "column 'label' of .*unlabelled.csv is blank"),
        ({"data": "same"}, BadRequest, "has only the label 'good' in 2 records or more; .*: add records of another"),
        ({"data": "five"}, BadRequest, "has no label in 2 records or more; add records of each of its 5 labels"),
        ({"data": "long"}, BadRequest, "has labels of more than 200 characters; map another column"),
        ({"data": "objects.jsonl"}, BadRequest, "column 'label' of .* has objects or lists; .*=COLUMN.NAME"),
        ({"task": "copa"}, InvalidDataset, "0 of 80 records fit task 'copa'"),
        ({"task": "nobody"}, BadRequest, "nobody"),
        ({"minutes": math.nan}, BadRequest, "--minutes nan is not a number"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, records, changes, error, message):
    base = tmp_path / "base"
    write_base(base)
    write_csv(tmp_path / "one-column.csv", 20, "text^label", ("a^b",))
    write_csv(tmp_path / "untold.csv", 20, "title;label")
    write_csv(tmp_path / "many.csv", 80, labels=tuple(map(str, range(40))))
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "blank.csv").write_text("text,label\n ,\n , \n")
    (tmp_path / "unlabelled.csv").write_text("text,label\na,\nb,\n")
    write_csv(tmp_path / "same.csv", 20, labels=("good",))
    write_csv(tmp_path / "five.csv", 5, labels=tuple("abcde"))
    write_csv(tmp_path / "long.csv", 20, labels=("a" * 201, "b" * 201))
    (tmp_path / "objects.jsonl").write_text('{"text": "a", "label": {"name": "b"}}\n' * 4)
    path = changes.get("data", records)
    path = tmp_path / (path if "." in path else f"{path}.csv") if isinstance(path, str) else path
    file = FileOptions(path, changes.get("fields", ()), changes.get("task"))
    options = Options(changes.get("base", str(base)), file, tmp_path / "home", changes.get("minutes"))
    with pytest.raises(error, match=message):
        quickstart(options, Console(file=io.StringIO()))
    assert not (tmp_path / "home").exists()


def test_the_options_of_the_file(tmp_path):
    path = tmp_path / "a.data"
    path.write_text("text^label\n" + "".join(f"café {n}^{n % 2}\n" for n in range(40)), encoding="cp1252")
    data = check(path, form=Format.CSV, delimiter="^", encoding="cp1252", name="Own name")
    assert (data.addition.name, data.check.fitting) == ("own-name", 40)


@pytest.mark.parametrize(
    ("labels", "answers"),
    [
        (("yes", "yes ", "no"), [" no", " yes"]),
        (("yes", "yes", "yes\u200b", "no"), [" no", " yes"]),
        (("Yes", "yes", "yes", " YES", "no"), [" no", " yes"]),
        (("1.0", "0.0"), [" 0", " 1"]),
        (("Maße", "Masse", "maße"), [" Masse", " Maße"]),  # two words
        (("bug", "bug report"), [" bug.", " bug report."]),
        (("bug", "Bug report"), [" Bug report.", " bug."]),  # for tokenizers that write lower case
        (("v1", "v1.2"), [" v1\n", " v1.2\n"]),
    ],
)
def test_labels_that_mean_the_same_are_offered_once(tmp_path, labels, answers):
    data = check(write_csv(tmp_path / "a.csv", 60, labels=labels))
    assert [answer.text for answer in data.task.answers] == answers
    assert data.check.fitting == 60


def test_rated_completions_teach_a_preference(tmp_path):
    path = tmp_path / "rated.jsonl"
    records = [{"prompt": f"Day {number}?", "completion": "Bright.", "label": number % 3 > 0} for number in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = check(path)
    assert (data.task.kind, data.task.preference_loss, data.check.fitting) == ("preference", "kto", 40)


def test_a_task_is_suggested_by_fields_that_the_first_record_lacks(tmp_path):
    rows = [{"text": "no label yet"}, *({"text": f"film {n}", "label": n % 2} for n in range(40))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(tmp_path / "a.jsonl").task.kind == "choice"


def test_a_second_file_joins_or_is_refused(tmp_path, records):
    home, more = tmp_path / "home", tmp_path / "more"
    more.mkdir()
    agent_home = AgentHome(home / "agent")
    check(records, home=home).save(agent_home)
    assert check(records, home=home).check.fitting == 80  # the same command continues
    second = write_csv(more / records.name, 120)
    others = write_csv(more / "My reviews.txt", 20)
    for path, fields in ((second, ()), (others, ()), (records, ("text=text",))):
        with pytest.raises(BadRequest, match=r"'my-reviews' exist, with 80 records .* --add .* --continue .* --name"):
            check(path, *fields, home=home)
    assert check(second, home=home, name="b").addition.name == "b"
    with pytest.raises(BadRequest, match="'my-reviews' has another task; leave out --task"):
        check(second, home=home, adds=True, task="sst2")
    joined = check(second, home=home, adds=True)
    assert (joined.check.fitting, len(joined.files), joined.suggested) == (120, 2, False)  # 80 records are in both
    joined.save(agent_home)
    for path in (records, second):
        assert check(path, home=home).files == joined.files


def test_a_wrong_file_is_one_line_and_status_2(tmp_path):
    options = ["--base", str(tmp_path), "--data", "missing.csv", "--home", str(tmp_path / "home")]
    result = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr


def running_in(directory):
    """Processes whose environment names the directory."""
    processes = []
    for process in psutil.process_iter():
        try:
            if any(str(directory) in value for value in process.environ().values()):
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


@pytest.mark.slow
def test_the_same_command_continues_after_an_interruption(tmp_path):
    records = write_csv(tmp_path / "My reviews.csv", 80, labels=("no", "yes"))  # as in docs/start.md: compiled once
    write_base(tmp_path / "tiny")
    home = tmp_path / "home"
    environment = os.environ | cached_compiler.environment() | {"PYTHONWARNINGS": "ignore"}
    command = [*COMMAND, "--base", str(tmp_path / "tiny"), "--data", str(records), "--home", str(home)]
    command += ["--minutes", "0", "--json"]

    first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (home / "jobs.json").exists():
        assert first.poll() is None, first.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(running_in(home)) >= 2
    first.send_signal(signal.SIGINT)
    assert b"the same command continues" in first.communicate(timeout=60)[1]
    assert first.returncode == 130
    assert not running_in(home)

    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert list(json.loads((home / "jobs.json").read_text()).values()) == [report["job_id"]]
    assert (report["adapter"], report["steps"]) == ("my-reviews@v1", 10)
    assert 0 <= report["accuracy_before"] <= 1
    assert not running_in(home)

    assert report["next"][0].startswith("mobizo-agent predict my-reviews")


@pytest.mark.slow
def test_texts_end_with_what_the_adapter_writes(tmp_path):
    write_base(tmp_path / "tiny")
    (tmp_path / "diary.txt").write_text("".join(f"the day {number} was bright and long\n" for number in range(40)))
    environment = os.environ | cached_compiler.environment() | {"PYTHONWARNINGS": "ignore"}
    paths = ["--base", str(tmp_path / "tiny"), "--data", str(tmp_path / "diary.txt"), "--home", str(tmp_path / "home")]
    command = [*COMMAND, *paths, "--minutes", "0", "--json"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["accuracy_after"] is None
    assert len(report["perplexity"]) == 2
    assert report["sample"]["prompt"].strip().startswith("the day")
    assert report["sample"]["adapter"]
