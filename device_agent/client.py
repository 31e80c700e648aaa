"""The device's routes of the protocol, typed. Knows no file of the agent's and no training."""

from __future__ import annotations

import json
import platform
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ValidationError

from device_agent.clock import ServerClock
from device_agent.errors import UnsafeManifest
from shared.capabilities import Capabilities
from shared.cohort import RoundReceipt
from shared.errors import ClockSkew, MobizoError, Replayed
from shared.job import JobError, Progress, Result
from shared.masking.messages import MaskingView, Phase
from shared.program import ProgramFile
from shared.protocol import (
    AdapterVersion,
    Completion,
    Decline,
    DeviceAdapter,
    DeviceEnrol,
    DeviceGrant,
    Lease,
    LeaseRequest,
    LeaseState,
    RunnerBuild,
    SignedRunner,
    UploadReceipt,
)
from shared.registry import AdapterManifest
from shared.request_signature import RequestSigner
from shared.succession import ServerKeys
from shared.transport import ByteProgress, Transport

HEARTBEAT_TIMEOUT = 10.0  # seconds
LEAVE_TIMEOUT = 2.0
_OWN = "/v1/devices/self/adapters"
REPLAY_TIMEOUT = 180.0  # that the server may take to replay a trajectory, behind others

Answer = TypeVar("Answer", bound=BaseModel)


class DeviceClient:
    """One device's conversation with its server; its methods may be called from several threads.

    clock: the server's, as its answers tell it; signatures go by it, so that a device whose own is off is heard.
    """

    def __init__(self, server: str, token: str, key: Ed25519PrivateKey | None = None) -> None:
        """server: base URL. token: the device's, or the one-time token of an enrolment.

        key: the device's; signs what changes things at the server.
        """
        self.clock = ServerClock()
        signer = None if key is None else RequestSigner(key, lambda: self.clock.now().timestamp())
        self._transport = Transport(server, token, signer=signer)

    def __enter__(self) -> DeviceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def enrol(self, name: str, public_key: str) -> DeviceGrant:
        """Trades a one-time token for a device's own. Raises Unauthorized if the token is spent or unknown."""
        body = DeviceEnrol(name=name, public_key=public_key, platform=platform.platform()[:200])
        # Once: a lost answer has spent the token, and a second try would only hide that.
        return _read(DeviceGrant, self._ask("POST", "/v1/devices", json=_json(body), retry=False))

    def lease(
        self,
        datasets: list[str],
        wait_seconds: float = 0,
        memory_bytes: int | None = None,
        capabilities: Capabilities | None = None,
    ) -> Lease | None:
        """A job that this device can train, or None; the same job again while its lease lives.

        memory_bytes: what can be spared; jobs that this device declined for want of more are left out. capabilities:
        what this device can do, so that it is offered nothing else; None: what it can is left unsaid. Raises
        UnsafeManifest for a lease whose program names a file that would lie outside its directory.
        """
        body = LeaseRequest(
            datasets=datasets, wait_seconds=wait_seconds, memory_bytes=memory_bytes, capabilities=capabilities
        )
        content = self._ask("POST", "/v1/leases", json=_json(body))
        return _read_lease(content) if content else None

    def heartbeat(self, lease_id: str, progress: Progress) -> LeaseState:
        """Keeps the lease and tells how far the run is; tried once. Raises Gone if the lease has ended."""
        path = f"/v1/leases/{lease_id}/heartbeat"
        answer = self._ask("POST", path, json=_json(progress), retry=False, timeout=HEARTBEAT_TIMEOUT)
        return _read(LeaseState, answer)

    def fail(self, lease_id: str, error: JobError) -> LeaseState:
        """Ends the job with a reason."""
        return _read(LeaseState, self._ask("POST", f"/v1/leases/{lease_id}/fail", json=_json(error)))

    def release(self, lease_id: str) -> LeaseState:
        """Gives the job back."""
        return _read(LeaseState, self._ask("POST", f"/v1/leases/{lease_id}/release"))

    def leave(self, lease_id: str) -> LeaseState:
        """Tells that this device stops: unless it is back within seconds, the job is another's. Tried once, shortly."""
        answer = self._ask("POST", f"/v1/leases/{lease_id}/leave", retry=False, timeout=LEAVE_TIMEOUT)
        return _read(LeaseState, answer)

    def decline(self, lease_id: str, reason: Decline) -> LeaseState:
        """Gives a job back that needs more memory than this device has."""
        return _read(LeaseState, self._ask("POST", f"/v1/leases/{lease_id}/decline", json=_json(reason)))

    def upload(self, lease_id: str, adapter: bytes) -> UploadReceipt:
        """Sends an adapter file."""
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._ask("PUT", f"/v1/leases/{lease_id}/adapter", content=adapter, headers=headers)
        return _read(UploadReceipt, answer)

    def upload_trajectory(self, lease_id: str, trajectory: bytes) -> UploadReceipt:
        """Sends a run's trajectory."""
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._ask("PUT", f"/v1/leases/{lease_id}/trajectory", content=trajectory, headers=headers)
        return _read(UploadReceipt, answer)

    def complete(
        self, lease_id: str, adapter_sha256: str, result: Result, trajectory_sha256: str | None = None
    ) -> AdapterVersion:
        """Ends the lease with the adapter uploaded before, or with one that the server makes of the trajectory.

        Raises TrajectoryMismatch if that yields another, NotReplayable if the adapter has to be uploaded, too.
        """
        body = Completion(adapter_sha256=adapter_sha256, result=result, trajectory_sha256=trajectory_sha256)
        return _read(AdapterVersion, self._complete(lease_id, body))

    def complete_round(
        self, lease_id: str, adapter_sha256: str, result: Result, trajectory_sha256: str | None = None
    ) -> RoundReceipt:
        """As `complete`, of a job of a cohort's round: the B that was sent is an update there."""
        body = Completion(adapter_sha256=adapter_sha256, result=result, trajectory_sha256=trajectory_sha256)
        return _read(RoundReceipt, self._complete(lease_id, body))

    def _complete(self, lease_id: str, body: Completion) -> bytes:
        timeout = None if body.trajectory_sha256 is None else REPLAY_TIMEOUT
        return self._ask("POST", f"/v1/leases/{lease_id}/complete", json=_json(body), timeout=timeout)

    def masking(self, lease_id: str, known: Phase | None) -> MaskingView:
        """How a leased job's masked round stands; without what `known`, a phase, gives to work with."""
        query = "" if known is None else f"?known={known}"
        return _read(MaskingView, self._ask("GET", f"/v1/leases/{lease_id}/masking{query}"))

    def say_in_masking(self, lease_id: str, phase: str, body: BaseModel) -> MaskingView:
        """Answers in a phase of a masked round: keys, shares, consent or unmask."""
        return _read(MaskingView, self._ask("POST", f"/v1/leases/{lease_id}/masking/{phase}", json=_json(body)))

    def send_masked(self, lease_id: str, vector: bytes) -> MaskingView:
        """Sends a masked update."""
        headers = {"Content-Type": "application/octet-stream"}
        path = f"/v1/leases/{lease_id}/masking/vector"
        return _read(MaskingView, self._ask("PUT", path, content=vector, headers=headers))

    def download(self, file: ProgramFile, target: Path, progress: ByteProgress | None = None) -> None:
        """Fetches a program file to `target`. Raises Untrusted if something else arrived."""
        self._transport.download(
            f"/v1/files/{file.sha256}", target, size=file.size, sha256=file.sha256, progress=progress
        )

    def download_start(
        self, lease_id: str, start: AdapterManifest, target: Path, progress: ByteProgress | None = None
    ) -> None:
        """Fetches the LoRA-B that a leased job goes on from. Raises Untrusted if something else arrived."""
        path = f"/v1/leases/{lease_id}/start"
        self._transport.download(path, target, size=start.size, sha256=start.sha256, progress=progress)

    def adapter(self, name: str, revision: str) -> DeviceAdapter:
        """An adapter version that this device may have. Raises AdapterNotFound, RevisionNotFound or VersionHeld."""
        return _read(DeviceAdapter, self._ask("GET", f"{_OWN}/{name}/{revision}"))

    def download_adapter(self, adapter: AdapterManifest, target: Path, progress: ByteProgress | None = None) -> None:
        """Fetches the LoRA-B of such a version. Raises Untrusted if something else arrived."""
        path = f"{_OWN}/{adapter.adapter}/{adapter.revision}/lora_B.safetensors"
        self._transport.download(path, target, size=adapter.size, sha256=adapter.sha256, progress=progress)

    def runner(self, system: str) -> SignedRunner:
        """The native runner that the server has for a platform such as linux-aarch64. Raises NotFound."""
        return _read(SignedRunner, self._ask("GET", f"/v1/runners/{system}"))

    def download_runner(self, build: RunnerBuild, target: Path, progress: ByteProgress | None = None) -> None:
        """Fetches a runner's archive to `target`. Raises Untrusted if something else arrived."""
        path = f"/v1/runners/{build.platform}/{build.sha256}"
        self._transport.download(path, target, size=build.size, sha256=build.sha256, progress=progress)

    def server_keys(self) -> ServerKeys:
        """The key that the server signs with now, and how the ones before handed over to it."""
        return _read(ServerKeys, self._ask("GET", "/v1/server/keys"))

    def _ask(self, method: str, path: str, **how: Any) -> bytes:
        try:
            response = self._transport.request(method, path, **how)
        except ClockSkew as error:
            # Nothing was done, so that even what is tried once may be sent again, by the server's time.
            self._correct(error)
            response = self._transport.request(method, path, **how)
        except Replayed:
            # Something on the way sent it twice, and the answer to the first is lost.
            if not how.get("retry", True):
                raise
            response = self._transport.request(method, path, **how)
        self.clock.hear(response.headers.get("Date"))
        return response.content

    def _correct(self, error: ClockSkew) -> None:
        try:
            moment = datetime.fromisoformat(str(error.extra.get("server_time")))
        except ValueError:
            raise error from None
        if moment.tzinfo is None:
            raise error
        self.clock.set(moment)


def _read_lease(content: bytes) -> Lease:
    """A lease. Raises UnsafeManifest, so that the server can be told, if its program names files that are paths."""
    try:
        return Lease.model_validate_json(content)
    except ValidationError as error:
        # For example ("manifest", "manifest", "files", 0, "name").
        bad = [found["input"] for found in error.errors() if found["loc"][2:3] + found["loc"][4:] == ("files", "name")]
        if bad:
            raise UnsafeManifest(str(json.loads(content).get("id")), str(bad[0])) from error
        return _read(Lease, content)


def _json(body: BaseModel) -> object:
    return body.model_dump(mode="json")


def _read(model: type[Answer], content: bytes) -> Answer:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise MobizoError(f"the server's answer is no {model.__name__}; is it of another version?") from error
