"""A kept adapter as a person uses it: without any network, and from the server what that lacks."""

import json
import shutil
import subprocess

import pytest

from device_agent.datasets.store import DatasetStore
from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.chat import Chat
from device_agent.inference.personal_model import open_personal
from device_agent.inference.predict import predict
from tests.device_agent.fake_server import FakeServer
from tests.device_agent.homes import enroll
from tests.device_agent.use import keep_adapter

# Runs a command in a network namespace without any link, not even to itself.
ALONE = ("unshare", "--user", "--map-root-user", "--net")


def can_be_alone():
    return shutil.which("unshare") is not None and subprocess.run([*ALONE, "true"], check=False).returncode == 0


offline = pytest.mark.skipif(not can_be_alone(), reason="this machine lets nobody make a network namespace")


@pytest.fixture
def adapter(home, rademacher, server_key):
    return keep_adapter(home, rademacher, server_key)


@pytest.fixture
def expected(home, adapter):
    """What the adapter says of a text, by the library."""
    model = open_personal(home, "alice-movies")

    def expected(text):
        return [candidate.probability for candidate in predict(model, {"text": text}, "here").candidates]

    yield expected
    model.close()


@offline
def test_predictions_need_no_network(agent, expected):
    process = agent("predict", "alice-movies", "--text", "a warm plot", "--json", before=ALONE)
    assert process.stderr == ""  # the runtime's own messages stay in the executor's log
    prediction = json.loads(process.stdout)
    assert [candidate["probability"] for candidate in prediction["candidates"]] == expected("a warm plot")
    assert [candidate["label"] for candidate in prediction["candidates"]] == ["negative", "positive"]
    assert prediction["label"] == ("negative", "positive")[expected("a warm plot").index(max(expected("a warm plot")))]


def test_records_come_from_fields_and_standard_input(agent, expected):
    def shares(process):
        lines = [json.loads(line) for line in process.stdout.splitlines()]
        return [[candidate["probability"] for candidate in line["candidates"]] for line in lines]

    assert shares(agent("predict", "alice-movies", "--field", "text=dull", "--json")) == [expected("dull")]
    lines = 'dull\n\n{"text": "a joy", "label": "unknown"}\n'
    assert shares(agent("predict", "alice-movies", "--json", input=lines)) == [expected("dull"), expected("a joy")]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["predict", "bob", "--text", "x"], 1, "stored: alice-movies"),
        (["predict", "Bob", "--text", "x"], 2, "not an adapter name"),
        (["predict", "alice-movies", "--field", "label=x"], 2, "once for each of text"),
        (["predict", "alice-movies", "--field", "text"], 2, "NAME=VALUE"),
        (["chat", "alice-movies", "--text", "x" * 100], 2, "share 64"),
        (["chat", "alice-movies", "--text", "x", "--feedback", "ratings"], 2, "leave --text out"),
        (["chat", "alice-movies", "--feedback", "My ratings"], 2, "must be lower-case letters"),
        (["adapter", "rollback", "alice-movies"], 1, "no previous version"),
        (["adapter", "pull", "bob"], 1, "when its job completes here"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(refused, adapter, arguments, status, words):
    actual, message = refused(*arguments)
    assert actual == status, message
    assert words in message


@offline
def test_a_chat_needs_no_network_and_reads_lines_until_there_are_none(agent, home, adapter):
    options = ("--max-tokens", "9", "--temperature", "1.5", "--seed", "3")
    process = agent("chat", "alice-movies", "--text", "it was", *options, before=ALONE)
    model = open_personal(home, "alice-movies")
    assert process.stdout == "".join(Chat(model, None, 9, 1.5, 3).answer("it was")) + "\n"
    assert "the model continues your text" in process.stderr
    process = agent("chat", "alice-movies", "--max-tokens", "5", "--json", input="it was\n\n" + "x" * 100 + "\nso\n")
    assert "share 64" in process.stderr  # one text too long does not end the conversation
    texts = ["".join(Chat(model, None, 5).answer(text)) for text in ("it was", "so")]
    model.close()
    assert [json.loads(line)["text"] for line in process.stdout.splitlines()] == texts


def test_a_chat_takes_feedback_on_its_answers_if_the_owner_names_a_data_set(agent, home, adapter):
    lines = ("/up", "it was", "/up", "/down", "so", "/edit better", "/edit", "the", "/down")
    options = ("chat", "alice-movies", "--max-tokens", "5", "--json")
    process = agent(*options, "--feedback", "ratings", input="\n".join(lines))
    answers = {line["text"]: line for line in map(json.loads, process.stdout.splitlines()) if "text" in line}
    first, second, third = answers
    added = [line for line in map(json.loads, process.stdout.splitlines()) if "text" not in line]
    assert [(line["dataset"], line["added"]) for line in added] == [("ratings", True)] * 3
    for words in ("write a text first", "an answer is rated once", "edit: "):
        assert words in process.stderr
    store = DatasetStore(home.data)
    records = [record for split in store.about("ratings").records for _, record in store.records("ratings", split)]
    expected = (
        {"prompt": "it was", "completion": first, "label": True},
        {"prompt": "so", "chosen": "better", "rejected": second},
        {"prompt": "the", "completion": third, "label": False},
    )
    assert len(records) == len(expected)
    assert all(record in records for record in expected)
    plain = agent(*options, input="/up\n")  # without the option it is a text as any other
    assert "text" in json.loads(plain.stdout)


def test_adapters_are_listed_rolled_back_and_removed(invoke, home, adapter, rademacher):
    (facts,) = [json.loads(line) for line in invoke("adapter", "list", "--json").splitlines()]
    assert (facts["name"], facts["job_id"], facts["usable"]) == ("alice-movies", "job-1", True)
    assert invoke("adapter", "list").startswith("alice-movies: sst2, of job job-1")
    store = AdapterStore(home)
    about = store.stored()[0]
    version = home.path / "adapters" / "alice-movies" / "00000001" / "adapter.safetensors"
    store.add("alice-movies", version.read_bytes(), about.signed, about.task, "job-2")
    assert "is now the adapter of job job-1" in invoke("adapter", "rollback", "alice-movies")
    assert json.loads(invoke("adapter", "list", "--json"))["job_id"] == "job-1"
    invoke("adapter", "remove", "alice-movies")
    assert "no adapters stored yet" in invoke("adapter", "list")


def test_pulling_fetches_what_use_lacks(invoke, refused, home, rademacher, server_key, adapter):
    inference = rademacher.manifest.file("inference")
    (home.cache / inference.sha256).unlink()
    assert not json.loads(invoke("adapter", "list", "--json"))["usable"]
    status, message = refused("predict", "alice-movies", "--text", "dull")
    assert status == 1
    assert "adapter pull alice-movies" in message
    with FakeServer(server_key) as server:
        enroll(home, server.url, server_key)
        server.files[inference.sha256] = rademacher.path("inference").read_bytes()
        pulled = json.loads(invoke("adapter", "pull", "--json"))
    assert pulled == {"adapter": "alice-movies", "files": 1, "bytes": inference.size}
    assert json.loads(invoke("predict", "alice-movies", "--text", "dull", "--json"))["label"]
