"""The daemon leases a job, trains it, and repeats. Programs run in executor processes, so torch is never imported."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import structlog

from device_agent.daemon.reporting import Display, Watchdog
from device_agent.datasets.store import AvailableDatasets, DatasetRemoved, DatasetStore
from device_agent.durable import describe_error, remove_leftovers
from device_agent.errors import PolicyForbids
from device_agent.executors.choice import LauncherSelector
from device_agent.executors.process import Launcher
from device_agent.home import PAUSED, AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.lease_and_policy import LeaseHeartbeat
from device_agent.jobs.leased_job import AgentContext, JobEnd, LeasedJob, Outcome
from device_agent.jobs.rounds import log_round, round_record
from device_agent.memory import map_large_blocks, release_code_pages, trim_heap
from device_agent.policy.evaluator import DailyMinutes, PolicyEvaluator, load_rules
from device_agent.policy.privacy_ledger import PrivacyLedger
from device_agent.policy.sensors import LinuxSensors, Sensors
from device_agent.policy.task_approvals import TaskApprovals
from device_agent.programs import ProgramCache, follow_key_rotation
from device_agent.protocol.client import Backoff, DeviceClient, jittered
from device_agent.training.run_directory import RunDirectory, prune_runs
from shared.capabilities import Capabilities
from shared.errors import BadRequest, MobizoError, Unauthorized
from shared.job import Progress
from shared.program import ProgramManifest
from shared.protocol import Lease, LeaseRequest
from shared.stop_signal import StopSignal

WAIT_SECONDS = 20.0  # long poll for a job
PAUSE_SECONDS = 30.0  # after a released job, or if the server does not answer
MAX_PAUSE_SECONDS = 300.0
EARLY_SECONDS = 5.0  # between requests if the server or a proxy does not support long polls
CHECK_SECONDS = 15.0  # between sensor readings while the rules forbid training
REFUSED_SECONDS = 600.0  # between requests to a server that refuses this device
ENROLLMENT_POLL_SECONDS = 5.0  # between checks for a new enrollment
UNFINISHED = frozenset(
    {Outcome.INTERRUPTED, Outcome.RELEASED, Outcome.DECLINED}
)  # the round may continue on this device

_log = structlog.get_logger()


class _Interrupted(Exception):
    """Raised in the main thread to stop waiting for a job."""


class Daemon:
    """The agent's main loop for one device and one server."""

    def __init__(
        self,
        home: AgentHome,
        data: Mapping[str, Path],
        display: Display,
        pause_seconds: float = PAUSE_SECONDS,
        *,
        launchers: Callable[[ProgramManifest], Launcher] | None = None,
        sensors: Sensors | None = None,
        watchdog: Watchdog | None = None,
        rules: Path | None = None,
        capabilities: Callable[[], Capabilities] | None = None,
    ) -> None:
        """data: directories of data sets outside the home, by name. pause_seconds: shortest pause after an error.
        launchers: returns what starts executors for a program; default: the best one of this machine. sensors: default:
        this machine's. rules: the owner's rules file; default: rules.toml in the home. capabilities: reported to the
        server; None reports nothing.

        Raises NotEnrolled, or BadRequest for unreadable rules and for a device without data sets.
        """
        self._home, self._display = home, display
        store = DatasetStore(home.data)
        store.remove_unreferenced()
        self._datasets = AvailableDatasets(store, data)
        if not self._datasets.directories():
            raise BadRequest(
                "this device has no data set; add one with `mobizo-agent data add NAME FILE`, or use --data NAME=DIR"
            )
        self._config = home.config()
        self._capabilities = capabilities
        self._watchdog = watchdog or Watchdog()
        self._store = AdapterStore(home)
        self._cache = ProgramCache(home.cache, pins=self._store.pins)
        self._sensors = LinuxSensors() if sensors is None else sensors
        owner_rules, self._consents = load_rules(rules or home.rules)
        self._evaluator = PolicyEvaluator(
            owner_rules,
            self._sensors,
            DailyMinutes(home.budget),
            lambda: PAUSED if home.paused.exists() else None,
        )
        if self._consents.privacy_limit is not None and find_spec("dp_accounting") is None:
            raise BadRequest(
                f"{rules or home.rules}: privacy_limit requires dp-accounting, which is not installed: "
                "pip install 'mobizo[privacy]'"
            )
        self._context = AgentContext(
            self._cache,
            self._store,
            self._evaluator,
            launchers or LauncherSelector(),
            self._consents,
            TaskApprovals(home.tasks),
            PrivacyLedger(home.privacy, self._consents, self._datasets.directories()),
            self._datasets,
            home,
        )
        self._pauses = Backoff(pause_seconds, MAX_PAUSE_SECONDS)
        self._early_seconds = min(pause_seconds, EARLY_SECONDS)
        self._downloads_due = True  # files of stored adapters may be missing
        self._checked_at = 0.0  # when the rules for a download were last checked, monotonic
        self._stopping = StopSignal()
        self._thread: threading.Thread | None = None
        self._waiting = False

    def stop(self) -> None:
        """Stops `run`: immediately while it waits for a job, otherwise after the current step. Safe in signal
        handlers.
        """
        self._stopping.set()
        # Signal handlers run in the main thread; in any other thread the exception would end the caller.
        if self._waiting and threading.current_thread() is self._thread:
            self._waiting = False
            raise _Interrupted

    def run(self, once: bool = False) -> JobEnd | None:
        """Works until stopped. once: returns after one job, or None if no job is waiting.

        Raises MobizoError only with `once`: the server does not answer or refuses this device, or the rules forbid
        training.
        """
        self._thread = threading.current_thread()
        map_large_blocks()
        remove_leftovers(self._home.path)
        while not self._stopping.is_set():
            try:
                with DeviceClient(self._config.server, self._config.token, self._home.device_key()) as client:
                    self._downloads_due = True
                    _release_memory()
                    if once:
                        return self._work_once(client, 0)
                    while not self._stopping.is_set():
                        self._serve(client)
            except _Interrupted:
                break
            except Unauthorized as error:
                if once:
                    raise
                self._await_enrollment(error)
        return JobEnd(Outcome.INTERRUPTED)

    def _serve(self, client: DeviceClient) -> None:
        """Runs one iteration: a job, a wait for a job, or a pause. Raises Unauthorized if the server refuses this
        device.
        """
        began = time.monotonic()
        try:
            # Jitter spreads the fleet's requests after a server restart.
            ended = self._work_once(client, jittered(WAIT_SECONDS))
        except Unauthorized:
            raise
        except PolicyForbids as error:
            self._display.hold("waiting", error.detail)
            self._wait(CHECK_SECONDS)
            return
        except MobizoError as error:
            pause = self._pauses.pause()
            _log.warning("the server leased no job", detail=error.detail, next_try_seconds=round(pause, 1))
            self._wait(pause)
            return
        if ended is not None and ended.outcome in (Outcome.RELEASED, Outcome.DECLINED):
            # The server may lease the same job again at once; wait for conditions to change.
            self._wait(max(self._pauses.pause(), jittered(ended.cooldown)))
            return
        self._pauses.reset()
        if ended is None and time.monotonic() - began < self._early_seconds:
            self._wait(jittered(self._early_seconds))

    def _work_once(self, client: DeviceClient, wait_seconds: float) -> JobEnd | None:
        """Requests a job and works on it; returns None if there is none. Raises PolicyForbids if the rules forbid
        training.
        """
        self._watchdog.feed()
        self._download_missing(client)
        self._check_rules()
        self._display.idle()
        self._waiting = True
        try:
            request = LeaseRequest(
                datasets=sorted(self._datasets.directories()),
                wait_seconds=wait_seconds,
                memory_bytes=self._evaluator.spare_bytes(self._evaluator.rules),
                capabilities=self._report_capabilities(),
            )
            lease = client.lease(request)
        finally:
            self._waiting = False
        return None if lease is None else self._work(client, lease)

    def _report_capabilities(self) -> Capabilities | None:
        """Returns the device's current capabilities."""
        if self._capabilities is None:
            return None
        readings = self._sensors.read(self._evaluator.rules)
        percent = readings.battery_percent
        power = {"battery": percent is not None, "charging": readings.charging, "battery_percent": percent}
        return self._capabilities().model_copy(update=power | {"cohorts": self._consents.cohorts})

    def _check_rules(self) -> None:
        """Raises PolicyForbids unless the owner's rules allow training and downloads."""
        rules = self._evaluator.rules
        decision = self._evaluator.training(rules)
        self._display.unknown(decision.unknown)
        if decision.action != "wait":
            decision = self._evaluator.transfer(rules)
        if decision.action == "wait":
            raise PolicyForbids(decision.local_why)

    def _work(self, client: DeviceClient, lease: Lease) -> JobEnd:
        job = lease.job
        run = self._home.run(job.id)
        self._display.begin(job.id, job.request.adapter, lease.round)
        self._config = follow_key_rotation(self._home, self._config, client, lease.manifest.key_id)
        try:
            with self._datasets.hold(job.request.dataset) as dataset, LeaseHeartbeat(client, lease) as heartbeat:
                ended = LeasedJob(
                    client=client,
                    lease=lease,
                    heartbeat=heartbeat,
                    context=self._context,
                    keys=self._config.trusted_keys(),
                    run=run,
                    dataset=dataset,
                    show=self._show,
                    wait=self._stopping.wait,
                ).work()
        except DatasetRemoved as error:  # while the request waited for a job
            client.release(lease.id)
            ended = JobEnd(Outcome.RELEASED, error.detail)
        self._log_round(lease, ended, run)
        if ended.outcome is Outcome.COMPLETED:
            self._downloads_due = True
            self._download_missing(client)
        _release_memory()
        prune_runs(self._home.runs)
        self._display.end(ended.outcome, ended.detail)
        return ended

    def _log_round(self, lease: Lease, ended: JobEnd, run: RunDirectory) -> None:
        """Adds the round to the round log once it has ended for this device."""
        if lease.round is None or ended.outcome in UNFINISHED:
            return
        try:
            log_round(self._home.rounds, round_record(lease.job.id, lease.round, ended, run.result()))
        except OSError as error:
            _log.warning("the round could not be logged", detail=describe_error(error))

    def _show(self, progress: Progress) -> None:
        if self._display.progress(progress):
            self._watchdog.feed(progress.line())

    def _download_missing(self, client: DeviceClient) -> None:
        """Downloads the missing files of stored adapters once the rules allow it. Other failures are only logged."""
        if not self._downloads_due or self._evaluator.download(self._evaluator.rules).action == "wait":
            return
        self._downloads_due, self._checked_at = False, time.monotonic()
        for about in self._store.stored():
            try:
                missing = [file for file in about.files if not self._cache.path(file).exists()]
                self._cache.reserve(missing)
                for file in missing:
                    self._cache.fetch(client, file, self._check_download)
            except PolicyForbids:
                self._downloads_due = True
                return
            except (MobizoError, OSError) as error:
                _log.warning("a stored adapter cannot be used yet", adapter=about.name, detail=describe_error(error))

    def _check_download(self, _arrived: int, _size: int) -> None:
        """Raises PolicyForbids if the daemon was asked to stop or the rules no longer allow downloads."""
        if self._stopping.is_set():
            raise PolicyForbids("the agent stops")
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._watchdog.feed()
            decision = self._evaluator.download(self._evaluator.rules)
            if decision.action == "wait":
                raise PolicyForbids(decision.local_why)

    def _await_enrollment(self, error: Unauthorized) -> None:
        """Waits until this device is enrolled again or the next retry is due."""
        self._display.hold(
            "refused",
            f"the server refuses this device, which was revoked or whose token has expired ({error.detail}); all runs "
            f"are kept; enroll it again: `mobizo-agent enroll --server {self._config.server} ...`",
        )
        deadline = time.monotonic() + jittered(REFUSED_SECONDS)
        while not self._stopping.is_set() and time.monotonic() < deadline:
            config = self._home.config()
            if config != self._config:
                _log.info("this device was enrolled again", server=config.server, name=config.name)
                self._config = config
                return
            self._wait(min(ENROLLMENT_POLL_SECONDS, max(deadline - time.monotonic(), 0)))

    def _wait(self, seconds: float) -> None:
        self._stopping.wait(seconds)
        self._watchdog.feed()


def _release_memory() -> None:
    """Releases memory of the last job, which is not needed while waiting for the next one."""
    gc.collect()
    trim_heap()
    release_code_pages()
