"""A typed client of the server's device routes."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ValidationError

from device_agent.secure_aggregation.participant import DeviceMessage
from shared.errors import ClockSkew, MobizoError, ReplayedRequest
from shared.federation.secure_aggregation.messages import (
    Advertisement,
    Consent,
    Phase,
    SealedShares,
    SecureAggregationView,
    Unmasking,
)
from shared.job import JobError, JobStart, Progress
from shared.key_rotation import ServerKeys
from shared.program import ProgramFile
from shared.protocol import (
    ChosenStart,
    Completion,
    Decline,
    DeviceAdapter,
    DeviceEnrollment,
    DeviceGrant,
    Lease,
    LeaseRequest,
    LeaseState,
    UploadReceipt,
)
from shared.registry import AdapterManifest
from shared.request_signature import RequestSigner
from shared.transport import ByteProgress, Transport

HEARTBEAT_TIMEOUT = 10.0  # seconds
LEAVE_TIMEOUT = 2.0
_ADAPTERS = "/v1/devices/self/adapters"
ROUTES = {Advertisement: "keys", SealedShares: "shares", Consent: "consent", Unmasking: "unmask"}
REPLAY_TIMEOUT = 180.0  # seconds in which the server replays a trajectory, behind others in the queue

Document = TypeVar("Document", bound=BaseModel)


class DeviceClient:
    """One device's connection to its server; thread-safe.

    clock: the server's clock. Request signatures use it, so that a device with a wrong clock is accepted.
    """

    def __init__(self, server: str, token: str, key: Ed25519PrivateKey | None = None) -> None:
        """server: base URL. token: the device's token, or a one-time enrollment token. key: the device's, signs
        state-changing requests.
        """
        self.clock = ServerClock()
        signer = None if key is None else RequestSigner(key, lambda: self.clock.now().timestamp())
        self._transport = Transport(server, token, signer=signer)

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self._transport.close()

    def enroll(self, name: str, public_key: str) -> DeviceGrant:
        """Exchanges a one-time token for a device token. Raises Unauthorized if the token is used or unknown."""
        body = DeviceEnrollment(name=name, public_key=public_key, platform=platform.platform()[:200])
        # One attempt: a lost response has used up the token, and a retry would hide that.
        return self._post(DeviceGrant, "/v1/devices", body, retry=False)

    def lease(self, request: LeaseRequest) -> Lease | None:
        """Leases a job that this device can train; None if there is none. Returns the same job again while its
        lease lives.
        """
        content = self._request("POST", "/v1/leases", json=_json(request))
        return _read(Lease, content) if content else None

    def heartbeat(self, lease_id: str, progress: Progress) -> LeaseState:
        """Extends the lease and reports progress; one attempt. Raises Gone if the lease has ended."""
        path = f"/v1/leases/{lease_id}/heartbeat"
        return self._post(LeaseState, path, progress, retry=False, timeout=HEARTBEAT_TIMEOUT)

    def choose_start(self, lease_id: str, start: JobStart | None) -> LeaseState:
        """Reports the start that this device has chosen; None: B = 0. Raises NotFound if it was deleted meanwhile."""
        return self._post(LeaseState, f"/v1/leases/{lease_id}/start", ChosenStart(start=start))

    def fail(self, lease_id: str, error: JobError) -> LeaseState:
        """Reports the job as failed."""
        return self._post(LeaseState, f"/v1/leases/{lease_id}/fail", error)

    def release(self, lease_id: str) -> LeaseState:
        """Releases the job."""
        return self._post(LeaseState, f"/v1/leases/{lease_id}/release")

    def leave(self, lease_id: str) -> LeaseState:
        """Reports that this device stops; the job is released unless it returns within seconds. One short attempt."""
        return self._post(LeaseState, f"/v1/leases/{lease_id}/leave", retry=False, timeout=LEAVE_TIMEOUT)

    def decline(self, lease_id: str, reason: Decline) -> LeaseState:
        """Declines a job that needs more memory than this device has."""
        return self._post(LeaseState, f"/v1/leases/{lease_id}/decline", reason)

    def upload(self, lease_id: str, adapter: bytes) -> UploadReceipt:
        """Uploads an adapter file."""
        return self._put(UploadReceipt, f"/v1/leases/{lease_id}/adapter", adapter)

    def upload_trajectory(self, lease_id: str, trajectory: bytes) -> UploadReceipt:
        """Uploads a run's trajectory."""
        return self._put(UploadReceipt, f"/v1/leases/{lease_id}/trajectory", trajectory)

    def complete(self, receipt: type[Document], lease_id: str, body: Completion) -> Document:
        """Completes the job with the uploaded adapter, or with one that the server replays from the trajectory.

        receipt: AdapterVersion, or RoundReceipt for a federated round, where the uploaded B is an update. Raises
        TrajectoryMismatch if the replay differs, NotReplayable if the adapter must be uploaded as well.
        """
        timeout = None if body.trajectory_sha256 is None else REPLAY_TIMEOUT
        return self._post(receipt, f"/v1/leases/{lease_id}/complete", body, timeout=timeout)

    def download(self, file: ProgramFile, target: Path, progress: ByteProgress | None = None) -> None:
        """Downloads a program file to `target`. Raises Untrusted if its hash differs."""
        self._transport.download(
            f"/v1/files/{file.sha256}", target, size=file.size, sha256=file.sha256, progress=progress
        )

    def download_start(
        self, lease_id: str, start: AdapterManifest, target: Path, progress: ByteProgress | None = None
    ) -> None:
        """Downloads the LoRA-B that a warm-started job begins with. Raises Untrusted if its hash differs."""
        path = f"/v1/leases/{lease_id}/start"
        self._transport.download(path, target, size=start.size, sha256=start.sha256, progress=progress)

    def adapter(self, name: str, revision: str) -> DeviceAdapter:
        """Returns an adapter version that this device may have. Raises AdapterNotFound, RevisionNotFound or
        VersionHeld.
        """
        return _read(DeviceAdapter, self._request("GET", f"{_ADAPTERS}/{name}/{revision}"))

    def download_adapter(self, adapter: AdapterManifest, target: Path, progress: ByteProgress | None = None) -> None:
        """Downloads the LoRA-B of an adapter version. Raises Untrusted if its hash differs."""
        path = f"{_ADAPTERS}/{adapter.adapter}/{adapter.revision}/lora_B.safetensors"
        self._transport.download(path, target, size=adapter.size, sha256=adapter.sha256, progress=progress)

    def server_keys(self) -> ServerKeys:
        """Returns the server's signing key and its signed key rotations."""
        return _read(ServerKeys, self._request("GET", "/v1/server/keys"))

    def _post(self, model: type[Document], path: str, body: BaseModel | None = None, **options: Any) -> Document:
        content = {} if body is None else {"json": _json(body)}
        return _read(model, self._request("POST", path, **content, **options))

    def _put(self, model: type[Document], path: str, content: bytes) -> Document:
        headers = {"Content-Type": "application/octet-stream"}
        return _read(model, self._request("PUT", path, content=content, headers=headers))

    def _request(self, method: str, path: str, **options: Any) -> bytes:
        try:
            response = self._transport.request(method, path, **options)
        except ClockSkew as error:
            # The request was rejected unprocessed, so it is safe to repeat with the server's time.
            try:
                self.clock.set(datetime.fromisoformat(str(error.extra.get("server_time"))))
            except ValueError:
                raise error from None
            response = self._transport.request(method, path, **options)
        except ReplayedRequest:
            # A proxy duplicated the request, and the first response is lost.
            if not options.get("retry", True):
                raise
            response = self._transport.request(method, path, **options)
        self.clock.observe(response.headers.get("Date"))
        return response.content


@dataclass
class LeaseSecureAggregationTransport:
    """The masked round's routes under one lease (`SecureAggregationTransport`); counts the bytes sent."""

    client: DeviceClient
    lease_id: str
    sent_bytes: int = 0

    def fetch_view(self, known_phase: Phase | None) -> SecureAggregationView:
        """Returns the round's current state."""
        query = "" if known_phase is None else f"?known={known_phase}"
        content = self.client._request("GET", f"/v1/leases/{self.lease_id}/masking{query}")
        return _read(SecureAggregationView, content)

    def send(self, message: DeviceMessage) -> SecureAggregationView:
        """Sends this device's message of a phase."""
        self.sent_bytes += len(message.model_dump_json())
        path = f"/v1/leases/{self.lease_id}/masking/{ROUTES[type(message)]}"
        return self.client._post(SecureAggregationView, path, message)

    def mask(self, vector: bytes) -> SecureAggregationView:
        """Sends the masked update."""
        self.sent_bytes += len(vector)
        return self.client._put(SecureAggregationView, f"/v1/leases/{self.lease_id}/masking/vector", vector)


def _json(body: BaseModel) -> object:
    return body.model_dump(mode="json")


def _read(model: type[Document], content: bytes) -> Document:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise MobizoError(f"the server's response is not a {model.__name__}; it may be of another version") from error


class ServerClock:
    """The server's time: the last response's Date plus the seconds since. Thread-safe."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, local: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """monotonic: a monotonic clock in seconds. local: this device's wall clock."""
        self._monotonic, self._local = monotonic, local
        self._observed: tuple[datetime, float] | None = None

    def observe(self, date: str | None) -> None:
        """Sets the clock from the Date header of a response that just arrived; ignores an invalid header."""
        with suppress(ValueError):
            self.set(parsedate_to_datetime(date or ""))

    def set(self, moment: datetime) -> None:
        """Sets the clock to a time that the server stated just now."""
        # A date without a zone is UTC (RFC 9110 requires "GMT").
        self._observed = (moment if moment.tzinfo else moment.replace(tzinfo=UTC), self._monotonic())

    def now(self) -> datetime:
        """Returns the server's time, to the second; this device's time before the first response."""
        if self._observed is None:
            return self._local()
        date, at = self._observed
        return date + timedelta(seconds=self._monotonic() - at)

    def seconds_until(self, moment: datetime) -> float:
        """Returns the seconds until a moment of the server's clock."""
        return (moment - self.now()).total_seconds()

    @property
    def skew(self) -> float | None:
        """This device's clock minus the server's, seconds; None before the first response."""
        return None if self._observed is None else (self._local() - self.now()).total_seconds()


class Backoff:
    """Delays in seconds that double with each failure, with jitter so that a fleet does not retry in step."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._next = shortest

    def pause(self) -> float:
        """Returns the next delay, between half of its nominal length and all of it."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return jittered(pause)

    def reset(self) -> None:
        """Resets the delay to the shortest one."""
        self._next = self._shortest


def jittered(seconds: float) -> float:
    """Returns a random duration between half of `seconds` and all of it."""
    return random.uniform(0.5, 1) * seconds
