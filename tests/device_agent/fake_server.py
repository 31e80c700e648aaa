"""The device's half of the protocol, served from memory over real HTTP, with every byte that arrives kept.

Can be told to misbehave. Knows no job states beyond what a device sees, and reads no signatures.
"""

import contextlib
import json
import re
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from shared.canonical import sha256_hex
from shared.errors import (
    AdapterNotFound,
    MobizoError,
    NotFound,
    Unauthorized,
)
from shared.federation.cohort import RoundReceipt, RoundTask
from shared.job import AUTO, JobError, JobRequest, JobStart, JobState, JobView, Progress, RoundRef
from shared.key_rotation import ServerKeys, SignedKeyRotation
from shared.program import SignedManifest
from shared.protocol import (
    AdapterVersion,
    ChosenStart,
    Completion,
    Decline,
    DeviceAdapter,
    DeviceGrant,
    Lease,
    LeaseRequest,
    LeaseState,
    ServerInfo,
    UploadReceipt,
)
from shared.registry import REVISION_DIGITS, SignedAdapter
from shared.signing import key_id, public_text, sign_manifest
from shared.training_settings import TrainingSettings
from tests.device_agent.tiny import TASK
from tests.http_server import Handler, http_server

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class _Requests(Handler):
    """Hands each request to the double, and its answer back."""

    def get(self):
        double, body = self.server.double, self.body()
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        double.received += [self.raw_requestline, head.encode("latin-1"), body]
        status, content = double.answer(self.command, self.path, body)
        if status == 200 and re.search(r"^/v1/files/|/start$|\.safetensors$", self.path):
            status, content = double.part_of(content, self.headers.get("Range"))
        self.answer(status, content)

    post = do_PUT = get  # noqa: N815  # http.server's names

    def date_time_string(self, timestamp=None):
        return format_datetime(datetime.now(UTC) + self.server.double.ahead, usegmt=True)


class FakeServer:
    """A server that holds jobs in a list and gives the first."""

    def __init__(self, key, lease_seconds=2.0, port=0):
        self.key, self.lease_seconds = key, lease_seconds
        self.ahead = timedelta()  # of its clock, compared with this machine's
        self.jobs: list[tuple[JobView, SignedManifest]] = []
        self.files: dict[str, bytes] = {}
        self.starts: dict[str, tuple[SignedAdapter | None, bytes]] = {}  # by the id of the job
        self.rounds: dict[str, RoundTask] = {}  # by the id of the job
        self.chosen: list[JobStart | None] = []
        self.candidates: dict[str, list[SignedAdapter]] = {}  # by the id of the job
        self.versions: dict[tuple[str, str], tuple[DeviceAdapter, bytes]] = {}  # by name and revision
        self.received: list[bytes] = []
        self.calls: list[tuple[str, str]] = []
        self.beats: list[Progress] = []
        self.failures: list[JobError] = []
        self.uploads: list[bytes] = []
        self.trajectories: list[bytes] = []
        self.completions: list[Completion] = []
        self.declines: list[Decline] = []
        self.lease_requests: list[LeaseRequest] = []
        self.broken: dict[str, list[Exception]] = {}  # action -> errors to answer with, one a call
        self.rotations: list[SignedKeyRotation] = []  # by which the keys before handed over to `key`
        self.reference_texts: tuple[str, ...] | None = None  # of each lease
        self.revoked = False
        self.stop = threading.Event()
        self.changed = threading.Condition()
        self.served = {"downloads": 0}
        self._port, self._running = port, contextlib.ExitStack()

    def __enter__(self):
        self.url = self._running.enter_context(http_server(_Requests, port=self._port, double=self)).url
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Answers nobody any more; done twice, it is done."""
        self._running.close()

    @property
    def received_bytes(self):
        """Every byte that devices sent."""
        return b"".join(self.received)

    def add_job(
        self, program, dataset="movies", job_id="job-1", *, start=None, candidates=(), task_of_round=None, **settings
    ):
        """Queues a job on a compiled program.

        start: a signed version and its file, which the job goes on from. candidates: several of them, among which the
        device chooses. task_of_round: of the round it belongs to.
        settings: of the request and of its training; also `manifest`, in place of the program's, and `key`, which signs
        it instead of the server's own.
        """
        for file in program.manifest.files:
            self.files[file.sha256] = program.path(file.role).read_bytes()
        manifest, key = settings.pop("manifest", program.manifest), settings.pop("key", self.key)
        training = {name: settings.pop(name) for name in tuple(settings) if name in TrainingSettings.model_fields}
        facts = {"base": "tiny", "user": "alice", "task": TASK, "dataset": dataset} | settings
        if start is not None:
            self.starts[job_id] = start
            facts["start"] = JobStart(adapter=start[0].manifest.adapter, revision=start[0].manifest.revision)
        if candidates:
            facts["start"] = AUTO
            self.candidates[job_id] = [version for version, _ in candidates]
            for version, data in candidates:
                served = DeviceAdapter(adapter=version, program=sign_manifest(manifest, key)), data
                self.versions[version.manifest.adapter, version.manifest.revision] = served
        if task_of_round is not None:
            self.rounds[job_id] = task_of_round
        training = TrainingSettings(**training)
        request = JobRequest(adapter=f"{facts['user']}-movies", training=training, **facts)
        job = JobView(
            id=job_id,
            state=JobState.TRAINING,
            request=request,
            task=request.task,
            recipe=program.manifest.recipe,
            recipe_id=program.manifest.recipe_id,
            round=task_of_round and RoundRef(cohort=task_of_round.cohort, number=task_of_round.number),
            attempts=0,
            device_id="device-1",
            created_at=NOW,
            updated_at=NOW,
            **dict.fromkeys(("progress", "result", "adapter_version", "error")),
        )
        self.jobs.append((job, sign_manifest(manifest, key)))

    def wait_for(self, condition, timeout=240):
        """Blocks until `condition()` holds, looked at after every call that arrives."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout), f"{timeout} s passed; calls so far: {self.calls[-10:]}"

    def wait_for_training(self):
        """Blocks until a device reports that it trains."""
        self.wait_for(lambda: any(beat.phase == "training" for beat in self.beats))

    def answer(self, method, path, body):
        parts = path.strip("/").split("/")[1:]
        action = (parts[2] if len(parts) > 2 else parts[0]).replace("-", "_")
        with self.changed:
            try:
                self.calls.append((method, action))
                if self.revoked:
                    raise Unauthorized
                if self.broken.get(action):
                    raise self.broken[action].pop(0)
                result = getattr(self, f"_{action}")(body, parts)
            except MobizoError as error:
                return error.status, json.dumps(error.problem()).encode()
            finally:
                self.changed.notify_all()
        if result is None:
            return 204, b""
        return 200, result if isinstance(result, bytes) else result.model_dump_json().encode()

    def _devices(self, body, parts):
        return DeviceGrant(device_id="device-1", token="device-token", server=self._server(body, ["server"]))

    def _server(self, body, parts):
        public = self.key.public_key()
        facts = {"public_key": public_text(public), "key_id": key_id(public)}
        return ServerKeys(**facts, rotations=self.rotations) if parts[1:] else ServerInfo(**facts, version="1.2")

    def _leases(self, body, parts):
        self.lease_requests.append(LeaseRequest.model_validate_json(body))
        datasets = self.lease_requests[-1].datasets
        entry = next(((job, signed) for job, signed in self.jobs if job.request.dataset in datasets), None)
        if entry is None:
            return None
        job, signed = entry
        start, _ = self.starts.get(job.id, (None, b""))
        of = self.rounds.get(job.id)
        facts = {"start": start, "round": of, "reference_texts": self.reference_texts, "expires_at": self._expiry()}
        candidates = self.candidates.get(job.id, ()) if job.request.start == AUTO else ()
        return Lease(id=f"lease-{job.id}", job=job, manifest=signed, starts=candidates, **facts)

    def _start(self, body, parts):
        """Serves the start of a job or, for a request with a body, pins the one that the device has chosen."""
        job_id = parts[1].removeprefix("lease-")
        if not body:
            self.served["downloads"] += 1
            return self.starts[job_id][1]
        chosen = ChosenStart.model_validate_json(body).start
        self.chosen.append(chosen)
        if chosen is not None:
            version, data = self.versions[chosen.adapter, chosen.revision]
            self.starts[job_id] = version.adapter, data
        for index, (job, signed) in enumerate(self.jobs):
            if job.id == job_id:
                request = job.request.model_copy(update={"start": chosen})
                self.jobs[index] = job.model_copy(update={"request": request}), signed
        return self._state()

    def _adapters(self, body, parts):
        version = self.versions.get((parts[3], parts[4]))
        if version is None:
            raise AdapterNotFound
        return version[1] if parts[-1].endswith(".safetensors") else version[0]

    def _heartbeat(self, body, parts):
        self.beats.append(Progress.model_validate_json(body))
        return self._state()

    def _fail(self, body, parts):
        self.failures.append(JobError.model_validate_json(body))
        self.jobs.pop(0)
        return self._state()

    def _release(self, body, parts):
        return self._state()

    _leave = _release

    def _decline(self, body, parts):
        self.declines.append(Decline.model_validate_json(body))
        self.jobs.pop(0)
        return self._state()

    def _adapter(self, body, parts):
        (self.trajectories if parts[2] == "trajectory" else self.uploads).append(body)
        return UploadReceipt(sha256=sha256_hex(body), size=len(body))

    _trajectory = _adapter

    def _complete(self, body, parts):
        completion = Completion.model_validate_json(body)
        if completion.trajectory_sha256 is None or self.uploads:
            assert completion.adapter_sha256 == sha256_hex(self.uploads[-1])
        if completion.trajectory_sha256 is not None:
            assert completion.trajectory_sha256 == sha256_hex(self.trajectories[-1])
        self.completions.append(completion)
        job, signed = self.jobs.pop(0)
        manifest = signed.manifest
        if job.round is not None:
            return RoundReceipt(cohort=job.round.cohort, round=job.round.number, updates=len(self.completions))
        return AdapterVersion(
            adapter=job.request.adapter,
            version=len(self.completions),
            job_id=job.id,
            device_id="device-1",
            recipe=job.recipe,
            recipe_id=job.recipe_id,
            a_sha256=manifest.a_sha256,
            sha256=completion.adapter_sha256,
            size=len(self.uploads[-1]) if self.uploads else 0,
            verified=completion.trajectory_sha256 is not None,
            size_d=manifest.size,
            result=completion.result,
            created_at=NOW,
            revision=completion.adapter_sha256[:REVISION_DIGITS],
        )

    def _files(self, body, parts):
        self.served["downloads"] += 1
        if parts[1] not in self.files:
            raise NotFound
        return self.files[parts[1]]

    def part_of(self, content, byte_range):
        """(status, what is sent) of a download."""
        start = int(re.fullmatch(r"bytes=(\d+)-", byte_range)[1]) if byte_range else 0
        return (206 if byte_range else 200), content[start:]

    def _state(self):
        stop = self.stop.is_set()
        return LeaseState(
            job_state=JobState.CANCELLED if stop else JobState.TRAINING, expires_at=self._expiry(), stop=stop
        )

    def _expiry(self):
        return datetime.now(UTC) + self.ahead + timedelta(seconds=self.lease_seconds)
