"""The device's routes of the protocol, typed. Knows no file of the agent's and no training."""

from __future__ import annotations

import platform
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shared.errors import MobizoError
from shared.job import JobError, Progress, Result
from shared.program import ProgramFile
from shared.protocol import (
    AdapterVersion,
    Completion,
    DeviceEnrol,
    DeviceGrant,
    Lease,
    LeaseRequest,
    LeaseState,
    RunnerBuild,
    SignedRunner,
    UploadReceipt,
)
from shared.transport import ByteProgress, Transport

HEARTBEAT_TIMEOUT = 10.0  # seconds

Answer = TypeVar("Answer", bound=BaseModel)


class DeviceClient:
    """One device's conversation with its server; its methods may be called from several threads."""

    def __init__(self, server: str, token: str) -> None:
        """server: base URL. token: the device's, or the one-time token of an enrolment."""
        self._transport = Transport(server, token)

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
        response = self._transport.request("POST", "/v1/devices", json=_json(body), retry=False)
        return _read(DeviceGrant, response.content)

    def lease(self, datasets: list[str], wait_seconds: float = 0) -> Lease | None:
        """A job that this device can train, or None; the same job again while its lease lives."""
        body = LeaseRequest(datasets=datasets, wait_seconds=wait_seconds)
        response = self._transport.request("POST", "/v1/leases", json=_json(body))
        return _read(Lease, response.content) if response.content else None

    def heartbeat(self, lease_id: str, progress: Progress) -> LeaseState:
        """Keeps the lease and tells how far the run is; tried once. Raises Gone if the lease has ended."""
        path = f"/v1/leases/{lease_id}/heartbeat"
        response = self._transport.request("POST", path, json=_json(progress), retry=False, timeout=HEARTBEAT_TIMEOUT)
        return _read(LeaseState, response.content)

    def fail(self, lease_id: str, error: JobError) -> LeaseState:
        """Ends the job with a reason."""
        response = self._transport.request("POST", f"/v1/leases/{lease_id}/fail", json=_json(error))
        return _read(LeaseState, response.content)

    def release(self, lease_id: str) -> LeaseState:
        """Gives the job back."""
        response = self._transport.request("POST", f"/v1/leases/{lease_id}/release")
        return _read(LeaseState, response.content)

    def upload(self, lease_id: str, adapter: bytes) -> UploadReceipt:
        """Sends an adapter file."""
        response = self._transport.request(
            "PUT",
            f"/v1/leases/{lease_id}/adapter",
            content=adapter,
            headers={"Content-Type": "application/octet-stream"},
        )
        return _read(UploadReceipt, response.content)

    def complete(self, lease_id: str, adapter_sha256: str, result: Result) -> AdapterVersion:
        """Ends the lease with the adapter uploaded before."""
        body = Completion(adapter_sha256=adapter_sha256, result=result)
        response = self._transport.request("POST", f"/v1/leases/{lease_id}/complete", json=_json(body))
        return _read(AdapterVersion, response.content)

    def download(self, file: ProgramFile, target: Path, progress: ByteProgress | None = None) -> None:
        """Fetches a program file to `target`. Raises Untrusted if something else arrived."""
        self._transport.download(
            f"/v1/files/{file.sha256}", target, size=file.size, sha256=file.sha256, progress=progress
        )

    def runner(self, system: str) -> SignedRunner:
        """The native runner that the server has for a platform such as linux-aarch64. Raises NotFound."""
        return _read(SignedRunner, self._transport.request("GET", f"/v1/runners/{system}").content)

    def download_runner(self, build: RunnerBuild, target: Path, progress: ByteProgress | None = None) -> None:
        """Fetches a runner's archive to `target`. Raises Untrusted if something else arrived."""
        path = f"/v1/runners/{build.platform}/{build.sha256}"
        self._transport.download(path, target, size=build.size, sha256=build.sha256, progress=progress)


def _json(body: BaseModel) -> object:
    return body.model_dump(mode="json")


def _read(model: type[Answer], content: bytes) -> Answer:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise MobizoError(f"the server's answer is no {model.__name__}; is it of another version?") from error
