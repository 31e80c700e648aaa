"""Logs as lines of JSON, and a server that outlives their reader."""

import json
import subprocess
import sys

SCRIPT = """
import structlog
from server.logs import configure_logs
configure_logs()
secret = "token-in-a-local"
try:
    raise RuntimeError("boom")
except RuntimeError:
    structlog.get_logger().exception("crashed", path="/x")
structlog.get_logger().info("after")
"""


def test_json_lines_without_local_variables():
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["crashed", "after"]
    assert "boom" in lines[0]["exception"]
    assert "token-in-a-local" not in process.stderr
    assert process.stdout == ""


def test_a_reader_that_went_away():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE)
    process.stderr.close()
    assert process.wait() == 0
