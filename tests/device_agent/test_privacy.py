"""Nothing of the examples leaves the device: every byte of a whole job is searched."""

import json

import pytest

from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display
from device_agent.jobs.leased_job import Outcome
from device_agent.policy.task_approvals import TaskApprovals, TaskState
from shared.task import Task
from tests.device_agent.fake_server import FakeServer
from tests.device_agent.homes import enroll
from tests.device_agent.tiny import TASK, write_records

MARKER = "Zürich-säntis"


def forms(record, tokenizer):
    """Every form in which a record's text could be recognised: plain, JSON-escaped, tokens as text and as bytes."""
    import numpy as np

    text = record["text"]
    tokens = tokenizer.encode(text + " It was").ids
    yield text.encode()
    yield json.dumps(text).strip('"').encode()
    for separator in (", ", ",", " "):
        yield separator.join(map(str, tokens[:8])).encode()
    for dtype in (np.int64, np.int32, np.int16, np.float32):
        yield np.asarray(tokens[:8], dtype).tobytes()


@pytest.mark.parametrize(
    "task",
    [
        TASK,
        Task(name="whole", kind="text"),
        Task(name="sequel", kind="completion", prompt="{text}", answer=" It was", metric="rouge_l"),
    ],
    ids=["choice", "text", "completion"],
)
def test_a_whole_job_and_a_failed_one_send_no_text_and_no_tokens(
    home, server_key, rademacher, tmp_path, launchers, task
):
    directory = tmp_path / "movies"
    directory.mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        write_records(directory / f"{split}.jsonl", 12, seed, MARKER)
    records = [json.loads(line) for path in directory.iterdir() for line in path.read_text().splitlines()]
    with FakeServer(server_key, lease_seconds=0.5) as server, Display(home) as display:
        enroll(home, server.url, server_key)
        TaskApprovals(home.tasks).decide(task, ["movies"], TaskState.APPROVED)
        daemon = Daemon(home, {"movies": directory}, display, launchers=launchers)
        server.add_job(rademacher, job_id="job-good", task=task, steps=20, evaluation_interval=5)
        assert daemon.run(once=True).outcome is Outcome.COMPLETED
        with (directory / "test.jsonl").open("a") as file:
            file.write((json.dumps({"note": MARKER, "label": MARKER}) + "\n") * 1000)
        server.add_job(rademacher, job_id="job-bad", task=task, steps=2)
        assert daemon.run(once=True).outcome is Outcome.FAILED
        traffic = server.received_bytes
    assert server.beats
    result = server.completions[0].result
    assert (result.token_loss_after is None) == (task is TASK)
    assert (result.written_after is not None) == task.compares_texts
    assert server.uploads[0] in traffic, "the recording must hold what was sent"
    assert len(server.uploads[0]) <= 4 * rademacher.manifest.size + 4096
    for piece in (MARKER, "rich-s", "Z\\u00fcrich"):
        assert piece.encode() not in traffic
    for record in records:
        for form in forms(record, rademacher.tokenizer):
            assert form not in traffic, form
    assert str(tmp_path).encode() not in traffic
