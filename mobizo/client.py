"""A typed client of the server's API for app backends. Knows routes and schemas; HTTP is the transport's."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

from shared.access import TokenGrant, TokenRequest, TokenView, WhoAmI
from shared.errors import RevisionNotFound, Untrusted
from shared.job import JobRequest, JobView, Progress
from shared.program import SignedManifest
from shared.protocol import (
    AdapterVersion,
    AdapterView,
    DeviceRequestView,
    Enrolment,
    EnrolmentRequest,
    JobWaiting,
    Page,
    PeftListing,
    ServerInfo,
)
from shared.transport import Transport

Item = TypeVar("Item")
Event = JobView | Progress


class Client:
    """One server, seen by one token. Every method raises shared.errors.MobizoError with what the server said."""

    def __init__(self, server: str, token: str) -> None:
        """server: base URL, such as http://127.0.0.1:8000. token: an app's or operator's token."""
        self._transport = Transport(server, token)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def _get(self, path: str, **params: Any) -> Any:
        return self._transport.request("GET", path, params=params or None).json()

    def server(self) -> ServerInfo:
        """Version and public key of the server."""
        return ServerInfo.model_validate(self._get("/v1/server"))

    def usage(self) -> dict[str, Any]:
        """What the server has used so far (operator): `peak_rss_bytes`."""
        usage: dict[str, Any] = self._get("/v1/server/usage")
        return usage

    def submit(self, request: JobRequest) -> JobView:
        """Asks for a job. Tried again where no answer came: the server makes one job of all tries."""
        return JobView.model_validate(self._make("/v1/jobs", request.model_dump(mode="json")))

    def job(self, job_id: str) -> JobView:
        """A job as it stands."""
        return JobView.model_validate(self._get(f"/v1/jobs/{job_id}"))

    def waiting(self, job_id: str) -> JobWaiting:
        """Why a job does not go on."""
        return JobWaiting.model_validate(self._get(f"/v1/jobs/{job_id}/waiting"))

    def jobs(self) -> Iterator[JobView]:
        """Every job of the tenant, newest first."""
        for item in self._pages("/v1/jobs"):
            yield JobView.model_validate(item)

    def cancel(self, job_id: str) -> JobView:
        """Stops a job wherever it is."""
        return JobView.model_validate(self._transport.request("POST", f"/v1/jobs/{job_id}/cancel").json())

    def watch(self, job_id: str) -> Iterator[Event]:
        """The job's events from its beginning, as they come: its view at each change of state, and its progress.

        Ends with the job; reconnects by itself where the stream broke off.
        """
        last: str | None = None
        while True:
            for event, event_id, data in self._transport.events(f"/v1/jobs/{job_id}/events", last_event_id=last):
                last = event_id or last
                if event == "progress":
                    yield Progress.model_validate(json.loads(data))
                elif event == "job":
                    view = JobView.model_validate(json.loads(data))
                    yield view
                    if view.state.final:
                        return
            if self.job(job_id).state.final:
                yield self.job(job_id)
                return

    def program(self, recipe_id: str) -> SignedManifest:
        """The signed manifest of the program that a recipe compiled to."""
        return SignedManifest.model_validate(self._get(f"/v1/programs/{recipe_id}"))

    def adapters(self) -> Iterator[AdapterView]:
        """Every adapter of the tenant."""
        for item in self._pages("/v1/adapters"):
            yield AdapterView.model_validate(item)

    def adapter(self, name: str) -> AdapterView:
        """One adapter with its latest version."""
        return AdapterView.model_validate(self._get(f"/v1/adapters/{name}"))

    def adapter_version(self, name: str, version: int) -> AdapterVersion:
        """One immutable version."""
        return AdapterVersion.model_validate(self._get(f"/v1/adapters/{name}/versions/{version}"))

    def pull(self, name: str, directory: Path, version: int | None = None) -> AdapterVersion:
        """Writes a version (`main` by default) as a PEFT directory; every file is checked against its sha256.

        Raises Untrusted for a file that does not match or whose name leaves the directory, RevisionNotFound if there is
        no `main`.
        """
        if version is None:
            version = self.adapter(name).main
            if version is None:
                raise RevisionNotFound(f"no version of adapter {name!r} is approved yet; say which one to pull")
        found = self.adapter_version(name, version)
        root = f"/v1/adapters/{name}/versions/{version}/peft"
        listing = PeftListing.model_validate(self._get(root))
        directory.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            if Path(file.path).name != file.path or file.path in ("", ".", ".."):
                raise Untrusted(f"the server names a file {file.path!r}, which is no plain file name")
            target = directory / file.path
            self._transport.download(f"{root}/{file.path}", target, size=file.size, sha256=file.sha256)
        return found

    def whoami(self) -> WhoAmI:
        """Whose token this is, and what it may do."""
        return WhoAmI.model_validate(self._get("/v1/whoami"))

    def tokens(self) -> Iterator[TokenView]:
        """Every token of the tenant's people and services, newest first (operator)."""
        for item in self._pages("/v1/tokens"):
            yield TokenView.model_validate(item)

    def make_token(self, request: TokenRequest) -> TokenGrant:
        """A new token, which may do no more than this client's; its text is told this once (operator)."""
        body = request.model_dump(mode="json")
        return TokenGrant.model_validate(self._make("/v1/tokens", body))

    def revoke_token(self, token_id: str) -> None:
        """Ends a token at once (operator)."""
        self._transport.request("DELETE", f"/v1/tokens/{token_id}", retry=False)

    def enrolment(self, request: EnrolmentRequest | None = None) -> Enrolment:
        """A one-time token with which a device may enrol (operator)."""
        body = (request or EnrolmentRequest.model_validate({})).model_dump(mode="json")
        return Enrolment.model_validate(self._make("/v1/enrolments", body))

    def _make(self, path: str, body: Any) -> Any:
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        return self._transport.request("POST", path, json=body, headers=headers).json()

    def device_request(self, user_code: str) -> DeviceRequestView:
        """The device that shows a code and asks to join (operator). Raises NotFound."""
        return DeviceRequestView.model_validate(self._get(f"/v1/device-requests/{quote(user_code, safe='')}"))

    def decide(self, user_code: str, approved: bool) -> DeviceRequestView:
        """Lets that device into the operator's tenant, or refuses it. Raises NotFound, Conflict."""
        path = f"/v1/device-requests/{quote(user_code, safe='')}/{'approve' if approved else 'deny'}"
        return DeviceRequestView.model_validate(self._transport.request("POST", path).json())

    def _pages(self, path: str) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            page = Page[Any].model_validate(self._get(path, **({"cursor": cursor} if cursor else {})))
            yield from page.items
            if page.next is None:
                return
            cursor = page.next
