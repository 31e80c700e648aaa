"""The daemon: lease a job, see it to its end, repeat. No job ends it. Imports no torch: training is another process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import structlog

from device_agent.assignment import Assignment, Ended, Outcome
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.display import Display
from device_agent.engines.python import PythonEngine
from device_agent.journal import prune_runs
from device_agent.lease import LeaseKeeper
from device_agent.state import Home
from shared.errors import BadRequest, MobizoError
from shared.protocol import Lease
from shared.signing import parse_public

WAIT_SECONDS = 20.0  # the server may hold a request for a job this long
PAUSE_SECONDS = 30.0  # after a job given back, or a server that does not answer
LONGEST_PAUSE_SECONDS = 300.0

_log = structlog.get_logger()


class _Interrupted(Exception):
    """The daemon was asked to stop while it waited for a job."""


class Daemon:
    """One device at work for one server."""

    def __init__(
        self, home: Home, datasets: Mapping[str, Path], display: Display, pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        """datasets: directory of each data set by name. pause_seconds: the shortest pause. Raises NotEnrolled."""
        self._home, self._datasets, self._display = home, dict(datasets), display
        self._config = home.config()
        self._key = parse_public(self._config.public_key)
        self._cache = FileCache(home.cache)
        self._pause_seconds = pause_seconds
        self._stopping = threading.Event()
        self._waiting = False

    def stop(self) -> None:
        """Ends `run` soon: at once while it waits for a job, else after the step in progress. For signal handlers."""
        self._stopping.set()
        if self._waiting and threading.current_thread() is threading.main_thread():
            self._waiting = False
            raise _Interrupted

    def run(self, once: bool = False) -> Ended | None:
        """Works until stopped. once: ends after one job, or when none is waiting (None is returned then).

        Raises MobizoError only with `once`, if the server does not answer or refuses this device.
        """
        pause = self._pause_seconds
        with DeviceClient(self._config.server, self._config.token) as client:
            while not self._stopping.is_set():
                try:
                    lease = self._next(client, 0 if once else WAIT_SECONDS)
                    ended = None if lease is None else self._work(client, lease)
                except _Interrupted:
                    break
                except MobizoError as error:
                    if once:
                        raise
                    _log.warning("no job from the server", detail=error.detail, next_try_seconds=pause)
                    self._stopping.wait(pause)
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                    continue
                pause = self._pause_seconds
                if once:
                    return ended
                if ended is not None and ended.outcome is Outcome.RELEASED:
                    # The server may hand the same job right back; give whatever was short time to change.
                    self._stopping.wait(pause)
        return Ended(Outcome.INTERRUPTED)

    def _next(self, client: DeviceClient, wait_seconds: float) -> Lease | None:
        self._waiting = True
        try:
            return client.lease(sorted(self._datasets), wait_seconds)
        finally:
            self._waiting = False

    def _work(self, client: DeviceClient, lease: Lease) -> Ended:
        job = lease.job
        run, dataset = self._home.run(job.id), self._datasets.get(job.request.dataset)
        if dataset is None:
            raise BadRequest(f"the server sent a job on {job.request.dataset!r}, a data set that this device lacks")
        self._display.begin(job.id, job.request.adapter)
        with LeaseKeeper(client, lease) as keeper:
            ended = Assignment(
                client=client,
                lease=lease,
                keeper=keeper,
                key=self._key,
                cache=self._cache,
                run=run,
                dataset=dataset,
                engine=PythonEngine(),
                show=self._display.progress,
                wait=self._stopping.wait,
            ).work()
        prune_runs(self._home.runs)
        self._display.end(ended.outcome, ended.detail)
        return ended
