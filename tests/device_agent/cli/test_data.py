"""The commands about data sets as the owner runs them, and the daemon that offers what they added."""

import json

import pytest

from device_agent.datasets.store import DatasetStore
from shared.errors import BadRequest, MobizoError, NotFound
from tests.device_agent.cli.test_tasks import URGENCY
from tests.device_agent.commands import run_agent


@pytest.fixture
def tickets(tmp_path):
    path = tmp_path / "tickets.csv"
    rows = [f"server {number} is \x1b[31mdown;{number % 2};{'x' * 99}" for number in range(100)]
    path.write_text("\n".join(["message;urgent;notes", *rows, rows[0], ";;a note"]))
    return path


MAPPED = ("--map", "text=message", "--map", "label=urgent")


def test_add_list_show_check_and_remove(invoke, tickets, home, tmp_path):
    task = tmp_path / "task.json"
    task.write_text(URGENCY.model_dump_json())
    dry = invoke("data", "add", "tickets", tickets, *MAPPED, "--task", task, "--dry-run")
    assert "nothing was written" in dry
    assert not home.data.exists()
    output = invoke("data", "add", "tickets", tickets, *MAPPED, "--task", task)
    assert "csv, delimiter semicolon" in output
    assert output.count("text: server") == 3
    assert "102 records read, 100 added; dropped: 1 duplicates, 1 empty, 0 too long" in output
    assert "labels: 0: 50, 1: 50" in output
    assert "task approve --file TASK --data tickets" in output
    assert "\x1b" not in output
    counts = json.loads(invoke("data", "list", "--json"))["records"]
    assert sum(counts.values()) == 100
    assert f"tickets: train {counts['train']}," in invoke("data", "list")
    invoke("task", "approve", "--file", task, "--data", "tickets")
    facts = json.loads(invoke("data", "view", "tickets", "--json"))
    assert (facts["fields"], facts["seed"], facts["tasks"][0]["state"]) == (["label", "text"], 0, "approved")
    assert "task urgency" in invoke("data", "view", "tickets")
    checks = [json.loads(line) for line in invoke("data", "check", "tickets", "--task", task, "--json").splitlines()]
    assert {check["split"]: check["fitting"] for check in checks} == counts
    with pytest.raises(MobizoError, match="less than half of train, validation, test fits task 'copa'"):
        invoke("data", "check", "tickets", "--task", "copa")
    assert "1 tasks may still read" in invoke("data", "remove", "tickets")
    assert "no data sets yet" in invoke("data", "list")
    for command in ("view", "remove"):
        with pytest.raises(NotFound, match="data list"):
            invoke("data", command, "tickets")


def test_json_has_no_record_text(invoke, tickets):
    out = invoke(
        "data", "add", "tickets", tickets, *MAPPED, "--task", "sst2", "--split", "90/10", "--seed", 3, "--json"
    )
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
def test_wrong_options_change_nothing(invoke, tickets, home, arguments, words):
    with pytest.raises(BadRequest, match=words):
        invoke("data", "add", arguments[0], tickets, *arguments[1:])
    assert not DatasetStore(home.data).directories()


@pytest.mark.parametrize("launcher", ["python"], indirect=True)
def test_a_daemon_offers_what_is_added_and_forgets_what_is_removed(invoke, make, enrolled, server, tickets, dataset):
    daemon = make(enrolled, {"movies": dataset})
    offers = []
    for command in ((), ("add", "tickets", tickets), ("remove", "tickets")):
        if command:
            invoke("data", *command)
        assert daemon.run(once=True) is None
        offers.append(server.lease_requests[-1].datasets)
    assert offers == [["movies"], ["movies", "tickets"], ["movies"]]
    assert str(enrolled.data).encode() not in server.received_bytes


def test_run_finds_the_homes_data_sets(invoke, enrolled, server, tickets):
    with pytest.raises(BadRequest, match="mobizo-agent data add"):
        invoke("run", "--once")
    invoke("data", "add", "tickets", tickets)
    run_agent(enrolled, "run", "--once", "--executor", "python")
    assert server.lease_requests[-1].datasets == ["tickets"]
