"""The commands about data sets as the owner runs them, and the daemon that offers what they added."""

import json

import pytest
from typer.testing import CliRunner

from device_agent.cli.app import app
from device_agent.cli.data import LARGE_BYTES, _progress
from device_agent.datasets.store import DatasetStore
from shared.errors import BadRequest, MobizoError, NotFound
from tests.device_agent.cli.test_tasks import URGENCY
from tests.device_agent.conftest import run_agent


@pytest.fixture
def agent(home):
    def agent(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments), "--home", str(home.path)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return agent


@pytest.fixture
def tickets(tmp_path):
    path = tmp_path / "tickets.csv"
    rows = [f"server {number} is \x1b[31mdown;{number % 2};{'x' * 99}" for number in range(100)]
    path.write_text("\n".join(["message;urgent;notes", *rows, rows[0], ";;a note"]))
    return path


MAPPED = ("--map", "text=message", "--map", "label=urgent")


def test_add_list_show_check_and_remove(agent, tickets, home, tmp_path):
    task = tmp_path / "task.json"
    task.write_text(URGENCY.model_dump_json())
    dry = agent("data", "add", "tickets", tickets, *MAPPED, "--task", task, "--dry-run")
    assert "nothing was written" in dry
    assert not home.data.exists()
    output = agent("data", "add", "tickets", tickets, *MAPPED, "--task", task)
    assert "csv, delimiter semicolon" in output
    assert output.count("text: server") == 3
    assert "102 records read, 100 added; dropped: 1 duplicates, 1 empty, 0 too long" in output
    assert "labels: 0: 50, 1: 50" in output
    assert "task approve --file TASK --data tickets" in output
    assert "\x1b" not in output
    counts = json.loads(agent("data", "list", "--json"))["records"]
    assert sum(counts.values()) == 100
    assert f"tickets: train {counts['train']}," in agent("data", "list")
    agent("task", "approve", "--file", task, "--data", "tickets")
    facts = json.loads(agent("data", "view", "tickets", "--json"))
    assert (facts["fields"], facts["seed"], facts["tasks"][0]["state"]) == (["label", "text"], 0, "approved")
    assert "task urgency" in agent("data", "view", "tickets")
    checks = [json.loads(line) for line in agent("data", "check", "tickets", "--task", task, "--json").splitlines()]
    assert {check["split"]: check["fitting"] for check in checks} == counts
    with pytest.raises(MobizoError, match="less than half of train, validation, test fits task 'copa'"):
        agent("data", "check", "tickets", "--task", "copa")
    assert "1 tasks may still read" in agent("data", "remove", "tickets")
    assert "no data sets yet" in agent("data", "list")
    for command in ("view", "remove"):
        with pytest.raises(NotFound, match="data list"):
            agent("data", command, "tickets")


def test_json_has_no_record_text(agent, tickets):
    out = agent("data", "add", "tickets", tickets, *MAPPED, "--task", "sst2", "--split", "90/10", "--seed", 3, "--json")
    facts = json.loads(out)
    assert "down" not in out
    assert facts["sources"] == [{"file": str(tickets), "format": "csv", "delimiter": ";"}]
    assert (facts["read"], facts["added"], facts["duplicates"], facts["empty"]) == (102, 100, 1, 1)
    assert (facts["split"], facts["seed"], sum(facts["records"].values())) == ("90/10/0", 3, 100)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Bad Name"], "lower-case"),
        (["tickets", "--map", "text"], "FIELD=..."),
        (["tickets", "--set", "a b=c"], "FIELD=..."),
        (["tickets", "--map", "text=nothing"], "the columns are message, urgent, notes"),
        (["tickets", "--split", "80"], "sum to 100"),
        (["tickets", "--replace", "--append"], "choose one"),
        (["tickets", "--task", "no-such-task"], "no task has this name"),
    ],
)
def test_wrong_options_change_nothing(agent, tickets, home, arguments, words):
    with pytest.raises(BadRequest, match=words):
        agent("data", "add", arguments[0], tickets, *arguments[1:])
    assert not DatasetStore(home.data).directories()


def test_a_progress_bar_for_large_files_on_terminals_only(tmp_path, capsys):
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" * LARGE_BYTES)
    with _progress([path], live=False) as progress:
        assert progress is None
    with _progress([path], live=True) as progress:
        progress(path, LARGE_BYTES // 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("launcher", ["python"], indirect=True)
def test_a_daemon_offers_what_is_added_and_forgets_what_is_removed(agent, make, enrolled, server, tickets, dataset):
    daemon = make(enrolled, {"movies": dataset})
    offers = []
    for command in ((), ("add", "tickets", tickets), ("remove", "tickets")):
        if command:
            agent("data", *command)
        assert daemon.run(once=True) is None
        offers.append(server.lease_requests[-1].datasets)
    assert offers == [["movies"], ["movies", "tickets"], ["movies"]]
    assert str(enrolled.data).encode() not in server.received_bytes


def test_run_finds_the_homes_data_sets(agent, enrolled, server, tickets):
    with pytest.raises(BadRequest, match="mobizo-agent data add"):
        agent("run", "--once")
    agent("data", "add", "tickets", tickets)
    process = run_agent(enrolled, "run", "--once", "--executor", "python")
    assert (process.returncode, server.lease_requests[-1].datasets) == (0, ["tickets"]), process.stderr


def test_an_error_is_one_line_and_status_2(home, tickets):
    process = run_agent(home, "data", "add", "tickets", str(tickets), "--map", "text=nothing")
    assert (process.returncode, len(process.stderr.strip().splitlines())) == (2, 1)
