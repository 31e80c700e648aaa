"""A stop request that is set by a signal handler."""

import subprocess
import sys

# A timer's signals arrive at every point of `wait`. With threading.Event this script hangs within milliseconds.
STORM = """
import signal, time
from shared.stop_signal import StopSignal
stop, count = StopSignal(), 0

def handler(*_):
    global count
    count += 1
    stop.set()

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
deadline = time.monotonic() + 1
while time.monotonic() < deadline:
    stop.wait(1e-4)
    stop.is_set()
signal.setitimer(signal.ITIMER_REAL, 0)
assert count > 100
"""


def test_a_signal_handler_may_set_it_during_a_wait():
    subprocess.run([sys.executable, "-c", STORM], check=True, timeout=60)
