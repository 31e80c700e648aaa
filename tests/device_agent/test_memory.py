"""Memory figures against the process's own doings."""

import subprocess
import sys

from tests.device_agent.native import ROOT

CODE = """
from device_agent.memory import peak_rss_bytes, rss_bytes
before = rss_bytes()
block = b"x" * (64 << 20)
assert rss_bytes() - before > 60 << 20
del block
assert peak_rss_bytes() - before > 60 << 20
print(peak_rss_bytes())
"""


def test_the_peak_is_the_process_own():
    ballast = b"x" * (256 << 20)
    process = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < len(ballast), "a child's peak must not be its parent's"
