"""A stop request that is set by a signal handler."""

import subprocess
import sys
import threading
import time

from shared.stop_signal import StopSignal

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


def test_a_wait_ends_at_its_timeout_or_when_set():
    stop = StopSignal()
    assert not stop.wait(0)
    assert not stop.wait(0.01)
    assert not stop.is_set()
    stop.set()
    stop.set()
    assert stop.is_set()
    assert stop.wait(60)
    assert stop.wait()


def test_it_wakes_every_waiting_thread():
    stop, woken = StopSignal(), []
    threads = [threading.Thread(target=lambda: woken.append(stop.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert woken == [True] * 3
