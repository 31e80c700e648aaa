"""Scratch directories, and what killed processes left of them."""

import signal
import subprocess
import sys

from server.storage.scratch import scratch

HOLD = """
import sys, time
from pathlib import Path
from server.storage.scratch import scratch
with scratch(Path(sys.argv[1]), ".x-") as path:
    (path / "file").write_text("half")
    print(path.name, flush=True)
    time.sleep(600)
"""


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_a_killed_process_left_goes_and_what_is_used_stays(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        name = process.stdout.readline().strip()
        with scratch(tmp_path, ".x-") as mine:
            assert names(tmp_path) == sorted([name, mine.name])
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert names(tmp_path) == [name]
        with scratch(tmp_path, ".x-") as mine:
            assert names(tmp_path) == [mine.name]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
