"""The command as a person runs it: options, exit statuses, signals."""

import json
import signal

import pytest

from device_agent.home import AgentHome
from shared.errors import Unauthorized
from tests.device_agent.native import ROOT


def test_enroll_pins_the_servers_key(agent, server, home):
    process = agent("enroll", "--server", server.url, "--token", "once", "--name", "jetson-1", "--json")
    config = AgentHome(home.path).config()
    assert json.loads(process.stdout) == {"device_id": "device-1", "server": server.url, "key_id": config.key_id}
    assert config.token == "device-token"
    assert b"Authorization: Bearer once" in server.received_bytes


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["enroll", "--server", "URL", "--token", "spent", "--name", "x"], 1, "valid token"),
        (["enroll", "--server", "http://127.0.0.1:9", "--token", "t", "--name", "x"], 1, "cannot be reached"),
        (["enroll", "--server", "URL", "--token", "t", "--name", "Not A Name"], 2, "lower-case"),
        (["enroll", "--server", "URL"], 2, "--name"),
        (["run", "--data", "movies"], 2, "NAME=DIR"),
        (["run", "--data", "Movies=/tmp"], 2, "NAME=DIR"),
        (["run", "--data", "movies=/nowhere/at/all"], 2, "has no train.jsonl"),
        (["run", "--data", "movies=."], 2, "no train.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(request, refused, server, arguments, status, words):
    if arguments[0] != "enroll":
        request.getfixturevalue("enrolled")
    server.broken["devices"] = [Unauthorized("a valid token is needed")]
    actual, message = refused(*(server.url if word == "URL" else word for word in arguments))
    assert actual == status, message
    assert words in message
    if status == 1:
        assert len(message.strip().splitlines()) == 1


def test_commands_need_an_enrollment(agent, dataset):
    assert "mobizo-agent enroll" in agent("run", "--data", f"movies={dataset}", status=2).stderr
    agent("status", status=2)


def test_run_once_trains_one_job_and_says_when_there_is_none(agent, enrolled, server, rademacher, dataset):
    server.add_job(rademacher, steps=2)
    run = ("run", "--once", "--data", f"movies={dataset}")
    events = [json.loads(line) for line in agent(*run, "--json").stdout.splitlines()]
    assert events[-1]["event"] == "job ended"
    assert events[-1]["outcome"] == "completed"
    assert {event.get("phase") for event in events} >= {"downloading", "training", "uploading"}
    assert "no job is waiting" in agent(*run).stderr
    status = json.loads(agent("status", "--json").stdout)
    assert (status["state"], status["running"], status["last_outcome"]) == ("stopped", False, "completed")
    assert "last job job-1 completed" in agent("status").stdout


def test_a_failed_job_is_status_1(agent, enrolled, server, rademacher, dataset):
    (dataset / "train.jsonl").write_text("{\n" * 1000)
    server.add_job(rademacher)
    process = agent("run", "--once", "--data", f"movies={dataset}", status=1)
    assert "train.jsonl:1: the line is not JSON" in " ".join(process.stderr.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_daemon(start_run, server, number, agent):
    daemon = start_run()
    server.wait_for(lambda: ("POST", "leases") in server.calls)
    process = agent("run", "--data", f"movies={ROOT / 'examples' / 'data' / 'movie_reviews'}", status=2)
    assert "uses this home" in process.stderr
    daemon.send_signal(number)
    assert daemon.wait(30) == 0
