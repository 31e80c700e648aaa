"""The device's half of the protocol, served from memory: one job to give, or none, and requests held as a server does.

Keeps no state of jobs beyond "given back whole". Checks nothing: it is not what is measured.
"""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pydantic import BaseModel

from bench.programs import Compiled
from bench.tiny import TASK
from device_agent.state import DeviceConfig, Home
from shared.canonical import sha256_hex
from shared.job import JobRequest, JobState, JobView, TrainingSettings
from shared.program import SignedManifest
from shared.protocol import AdapterVersion, Completion, Lease, LeaseRequest, LeaseState, UploadReceipt
from shared.signing import key_id, new_private_key, public_text, sign_manifest

LEASE_SECONDS = 5.0
DATASET = "movies"
JOB = "job-1"


class Giver:
    """A server on loopback."""

    def __init__(self, program: Compiled | None = None, training: TrainingSettings | None = None) -> None:
        """program: of the one job that is given until it is completed; None for a server without jobs."""
        self._key = new_private_key()
        self._files: dict[str, Path] = {}
        self._lease: tuple[JobView, SignedManifest] | None = None
        self._upload = b""
        self.completed = False
        self.failed: str | None = None
        self.heard: list[str] = []  # what was asked for, in order
        if program is not None and training is not None:
            self._give(program, training)
        giver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content = giver._answer(self.path, body)
                start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                if status == 200 and start and self.path.startswith("/v1/files/"):
                    status, content = 206, content[int(start[1]) :]
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _handle  # noqa: N815  # http.server's names

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that was killed is no news."""

        self._http = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Giver:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def enrol(self, path: Path) -> Home:
        """A new home at `path` whose device this server knows."""
        home, public = Home(path), self._key.public_key()
        home.create()
        url = f"http://127.0.0.1:{self._http.server_address[1]}"
        about = {"server": url, "name": "bench", "device_id": "device-1", "token": "token"}
        home.enrol(DeviceConfig(**about, public_key=public_text(public), key_id=key_id(public)))
        return home

    def _give(self, program: Compiled, training: TrainingSettings) -> None:
        self._files = {file.sha256: program.directory / file.name for file in program.manifest.files}
        request = JobRequest(base="tiny", user="bench", adapter="bench", task=TASK, dataset=DATASET, training=training)
        now = datetime.now(UTC)
        job = JobView(
            id=JOB,
            state=JobState.TRAINING,
            request=request,
            task=TASK,
            recipe=program.manifest.recipe,
            recipe_id=program.manifest.recipe_id,
            attempts=0,
            device_id="device-1",
            progress=None,
            result=None,
            adapter_version=None,
            error=None,
            created_at=now,
            updated_at=now,
        )
        self._lease = (job, sign_manifest(program.manifest, self._key))

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        parts = path.strip("/").split("/")[1:]
        action = parts[2] if len(parts) > 2 else parts[0]
        self.heard.append(action)
        if action == "files":
            return 200, self._files[parts[1]].read_bytes()
        found = getattr(self, f"_{action}", self._unknown)(body)
        if found is None:
            return 204, b""
        return (200, found.model_dump_json().encode()) if isinstance(found, BaseModel) else (404, found)

    def _leases(self, body: bytes) -> Lease | None:
        if self._lease is None or self.completed:
            time.sleep(LeaseRequest.model_validate_json(body).wait_seconds)
            return None
        job, manifest = self._lease
        return Lease.model_validate({"id": "lease-1", "job": job, "manifest": manifest, "expires_at": _expiry()})

    def _heartbeat(self, _body: bytes) -> LeaseState:
        return LeaseState(job_state=JobState.TRAINING, expires_at=_expiry(), stop=False)

    def _release(self, body: bytes) -> LeaseState:
        return self._heartbeat(body)

    def _fail(self, body: bytes) -> LeaseState:
        self.failed = body.decode()
        return self._heartbeat(body)

    _decline = _fail

    def _adapter(self, body: bytes) -> UploadReceipt:
        self._upload = body
        return UploadReceipt(sha256=sha256_hex(body), size=len(body))

    def _complete(self, body: bytes) -> AdapterVersion:
        completion = Completion.model_validate_json(body)
        assert self._lease is not None
        job, signed = self._lease
        self.completed = True
        manifest = signed.manifest
        return AdapterVersion(
            adapter=job.request.adapter,
            version=1,
            job_id=job.id,
            device_id="device-1",
            recipe=job.recipe,
            recipe_id=job.recipe_id,
            a_sha256=manifest.a_sha256,
            sha256=completion.adapter_sha256,
            size=len(self._upload),
            size_d=manifest.size,
            result=completion.result,
            created_at=datetime.now(UTC),
        )

    def _unknown(self, _body: bytes) -> bytes:
        return json.dumps(
            {"title": "Not found", "status": 404, "detail": "no such thing", "code": "not-found"}
        ).encode()


def _expiry() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=LEASE_SECONDS)
