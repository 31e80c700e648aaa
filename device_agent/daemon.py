"""The daemon: lease a job, see it to its end, repeat. No job ends it. Imports no torch: training is another process."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from device_agent.adapters import AdapterShelf
from device_agent.assignment import Assignment, Ended, Outcome, Tools
from device_agent.backoff import Backoff, jittered
from device_agent.budget import DailyBudget
from device_agent.cache import FileCache
from device_agent.client import DeviceClient
from device_agent.control import Pause
from device_agent.datasets import most_lines
from device_agent.display import Display
from device_agent.engines import Engine
from device_agent.engines.python import PythonEngine
from device_agent.errors import NotNow, UnsafeManifest, os_words
from device_agent.guard import Guard
from device_agent.journal import RunDirectory, prune_runs
from device_agent.lease import LeaseKeeper
from device_agent.memory import drop_idle_code
from device_agent.rounds import RoundLog, past_round
from device_agent.rules_file import load_consents, load_rules
from device_agent.seen import SeenVersions
from device_agent.sensors import Sensors
from device_agent.sensors_linux import LinuxSensors
from device_agent.state import Home
from device_agent.trust import follow_server
from device_agent.watchdog import Watchdog
from shared.capabilities import Capabilities
from shared.errors import BadRequest, MobizoError, Unauthorized
from shared.job import JobError, Progress
from shared.program import ProgramManifest
from shared.protocol import Lease

WAIT_SECONDS = 20.0  # the server may hold a request for a job this long
PAUSE_SECONDS = 30.0  # after a job given back, or a server that does not answer
LONGEST_PAUSE_SECONDS = 300.0
EARLY_SECONDS = 5.0  # at least between requests for a job, where the server, or what is before it, holds none
LOOK_SECONDS = 15.0  # between looks at the sensors while no job is asked for
REFUSED_SECONDS = 600.0  # between words with a server that does not know this device any more
ENROLLED_SECONDS = 5.0  # between looks whether this device was enrolled again meanwhile
SKEW_SECONDS = 60.0  # between two clocks is worth telling a person
UNFINISHED = frozenset({Outcome.INTERRUPTED, Outcome.RELEASED, Outcome.DECLINED})  # the round may go on here

_log = structlog.get_logger()


def python_engine(_manifest: ProgramManifest) -> Engine:
    """The engine that every program can be trained with."""
    return PythonEngine()


def longest_silence(manifest: ProgramManifest, dataset: Path) -> float:
    """Operations of the longest work of a run that nothing is heard of: a step, or measuring on the longest file."""
    recipe = manifest.recipe
    steps = most_lines(dataset) * recipe.choices / (2 * recipe.queries * recipe.effective_batch)
    return manifest.flops_per_step * max(1.0, steps)


class _Interrupted(Exception):
    """The daemon was asked to stop while it waited for a job."""


class Daemon:
    """One device at work for one server."""

    def __init__(
        self,
        home: Home,
        datasets: Mapping[str, Path],
        display: Display,
        pause_seconds: float = PAUSE_SECONDS,
        *,
        engines: Callable[[ProgramManifest], Engine] = python_engine,
        sensors: Sensors | None = None,
        watchdog: Watchdog | None = None,
        cache_bytes: int | None = None,
        rules: Path | None = None,
        capabilities: Callable[[], Capabilities] | None = None,
    ) -> None:
        """datasets: directory of each data set by name. pause_seconds: the shortest pause.

        engines: what trains a program. sensors: this machine's by default. cache_bytes: of program files at most.
        rules: the owner's; the home's rules.toml by default. capabilities: of `engines`; None: they are left unsaid.
        Raises NotEnrolled, or BadRequest for rules that cannot be read.
        """
        self._home, self._datasets, self._display = home, dict(datasets), display
        self._config = home.config()
        self._capabilities = capabilities
        self._engines, self._watchdog = engines, watchdog or Watchdog()
        self._seen, self._shelf = SeenVersions(home.seen), AdapterShelf(home)
        self._cache = FileCache(home.cache, cache_bytes, self._shelf.pins)
        pause = Pause(home.path)
        self._guard = Guard(
            load_rules(rules or home.rules),
            LinuxSensors() if sensors is None else sensors,
            DailyBudget(home.budget),
            pause.why,
        )
        self._consents = load_consents(rules or home.rules)
        self._rounds = RoundLog(home.rounds)
        self._pauses = Backoff(pause_seconds, LONGEST_PAUSE_SECONDS)
        self._early_seconds = min(pause_seconds, EARLY_SECONDS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._waiting = False

    def stop(self) -> None:
        """Ends `run` soon: at once while it waits for a job, else after the step in progress. For signal handlers."""
        self._stopping.set()
        # Only in the thread that waits, which a signal handler's is: elsewhere it would end whoever asks.
        if self._waiting and threading.current_thread() is self._thread:
            self._waiting = False
            raise _Interrupted

    def run(self, once: bool = False) -> Ended | None:
        """Works until stopped. once: ends after one job, or when none is waiting (None is returned then).

        Raises MobizoError only with `once`: if the server does not answer or refuses this device, or the rules do not
        allow training now.
        """
        self._thread = threading.current_thread()
        while not self._stopping.is_set():
            try:
                with DeviceClient(self._config.server, self._config.token, self._home.device_key()) as client:
                    self._restock(client)
                    if once:
                        return self._turn(client, 0)
                    while not self._stopping.is_set():
                        self._serve(client)
            except _Interrupted:
                break
            except Unauthorized as error:
                if once:
                    raise
                self._await_enrolment(error)
        return Ended(Outcome.INTERRUPTED)

    def _serve(self, client: DeviceClient) -> None:
        """A job, a wait for one, or a pause. Raises Unauthorized if the server refuses this device."""
        began = time.monotonic()
        try:
            # Devices that a server's restart brought together drift apart.
            ended = self._turn(client, jittered(WAIT_SECONDS))
        except Unauthorized:
            raise
        except NotNow as error:
            self._display.waiting(error.detail)
            self._rest(LOOK_SECONDS)
            return
        except MobizoError as error:
            pause = self._pauses.pause()
            _log.warning("no job from the server", detail=error.detail, next_try_seconds=round(pause, 1))
            self._rest(pause)
            return
        if ended is not None and ended.outcome in (Outcome.RELEASED, Outcome.DECLINED):
            # The server may hand the same job right back; give whatever was short time to change.
            self._rest(max(self._pauses.pause(), jittered(ended.rest)))
            return
        self._pauses.reset()
        if ended is None and time.monotonic() - began < self._early_seconds:
            self._rest(jittered(self._early_seconds))

    def _turn(self, client: DeviceClient, wait_seconds: float) -> Ended | None:
        """Asks for a job and works on it; None if there is none. Raises NotNow if this device's rules forbid it."""
        self._watchdog.turn()
        self._look()
        self._display.idle()
        self._waiting = True
        try:
            memory = self._guard.spare_bytes(self._guard.rules)
            lease = client.lease(sorted(self._datasets), wait_seconds, memory, self._can())
        except UnsafeManifest as error:
            _log.error("a job is refused", detail=error.detail)
            client.fail(error.lease_id, JobError(code=error.code, detail=error.detail))
            return Ended(Outcome.FAILED, error.detail)
        finally:
            self._waiting = False
        skew = client.clock.skew
        if skew is not None and abs(skew) >= SKEW_SECONDS:
            self._display.skew(round(skew))
        return None if lease is None else self._work(client, lease)

    def _can(self) -> Capabilities | None:
        """What this device can do, as it stands now."""
        if self._capabilities is None:
            return None
        charging, percent = self._guard.power(self._guard.rules)
        power = {"battery": percent is not None, "charging": charging, "battery_percent": percent}
        return self._capabilities().model_copy(update=power | {"cohorts": self._consents.cohorts})

    def _look(self) -> None:
        """Raises NotNow unless the owner's rules allow training and its downloads."""
        rules = self._guard.rules
        decision = self._guard.training(rules)
        self._display.unknown(decision.unknown)
        if decision.action != "wait":
            decision = self._guard.transfer(rules)
        if decision.action == "wait":
            raise NotNow(decision.why or "the rules do not allow it now")

    def _work(self, client: DeviceClient, lease: Lease) -> Ended:
        job = lease.job
        run, dataset = self._home.run(job.id), self._datasets.get(job.request.dataset)
        if dataset is None:
            raise BadRequest(f"the server sent a job on {job.request.dataset!r}, a data set that this device lacks")
        self._display.begin(job.id, job.request.adapter, lease.round)
        self._watchdog.expect(longest_silence(lease.manifest.manifest, dataset))
        self._config = follow_server(self._home, self._config, client, lease.manifest.key_id)
        keys = self._config.trusted_keys()
        with LeaseKeeper(client, lease) as keeper:
            ended = Assignment(
                client=client,
                lease=lease,
                keeper=keeper,
                tools=Tools(
                    keys, self._cache, self._seen, self._shelf, self._guard, self._engines, self._consents, self._home
                ),
                run=run,
                dataset=dataset,
                show=self._show,
                wait=self._stopping.wait,
            ).work()
        self._remember(lease, ended, run)
        if ended.outcome is Outcome.COMPLETED:
            self._restock(client)
        prune_runs(self._home.runs)
        self._display.end(ended.outcome, ended.detail)
        return ended

    def _remember(self, lease: Lease, ended: Ended, run: RunDirectory) -> None:
        """Notes how a cohort's round ended here, if it has ended."""
        if lease.round is None or ended.outcome in UNFINISHED:
            return
        try:
            self._rounds.add(past_round(lease.job.id, lease.round, ended, run.result()))
        except OSError as error:
            _log.warning("the round is not noted on this device", detail=os_words(error))

    def _show(self, progress: Progress) -> None:
        self._display.progress(progress)
        self._watchdog.show(progress)

    def _restock(self, client: DeviceClient) -> None:
        """Fetches what kept adapters lack for use on this device; a job does not depend on it. Gives back memory."""
        if self._guard.transfer(self._guard.rules).action == "train":
            for about in self._shelf.kept():
                try:
                    missing = [file for file in about.files if not self._cache.path(file).exists()]
                    self._cache.reserve(missing)
                    for file in missing:
                        self._cache.fetch(client, file, lambda _arrived, _size: self._watchdog.turn())
                except (MobizoError, OSError) as error:
                    words = os_words(error) if isinstance(error, OSError) else error.detail
                    _log.warning("an adapter cannot be used on this device yet", adapter=about.name, detail=words)
        # What a job, or the start of this process, took once is not needed to wait for the next one.
        gc.collect()
        drop_idle_code()

    def _await_enrolment(self, error: Unauthorized) -> None:
        """Waits until this device was enrolled again, or long enough to ask whether the server has changed its mind."""
        self._display.refused(
            f"the server refuses this device: it was revoked, or its token has expired ({error.detail}); all runs are "
            f"kept; to go on, enrol it again: `mobizo-agent enroll --server {self._config.server} ...`"
        )
        deadline = time.monotonic() + jittered(REFUSED_SECONDS)
        while not self._stopping.is_set() and time.monotonic() < deadline:
            config = self._home.config()
            if config != self._config:
                _log.info("this device was enrolled again", server=config.server, name=config.name)
                self._config = config
                return
            self._rest(min(ENROLLED_SECONDS, max(deadline - time.monotonic(), 0)))

    def _rest(self, seconds: float) -> None:
        self._stopping.wait(seconds)
        self._watchdog.turn()
