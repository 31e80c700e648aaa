"""JSON models of the REST API for servers, devices, leases, programs and adapters.

The routes themselves are described by the server's OpenAPI document (`docs/openapi.json`). Models of jobs are in
`shared.job`, of base models and calibrations in `shared.catalog`, of federation in
`shared.federation.cohort`, of the registry in `shared.registry`, of tokens in `shared.access`, of privacy budgets in
`shared.privacy`, and of scoring and generation in `shared.scoring`. Devices sign their requests
(`shared.request_signature`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Generic, TypeVar

from pydantic import Field, FiniteFloat

from shared.capabilities import Capabilities, LabelName, Labels, LabelValue
from shared.federation.cohort import CohortOrigin, RoundTask
from shared.job import NAME, JobStart, JobState, JobView
from shared.program import SignedManifest
from shared.recipe import Recipe, Sha256
from shared.registry import Parent, SignedAdapter, VersionState
from shared.result import Result
from shared.strict_model import StrictModel

Item = TypeVar("Item")

MAX_USERS = 100  # of one device
Users = Annotated[
    list[Annotated[str, Field(pattern=NAME)]],
    Field(
        max_length=MAX_USERS,
        description="users whose data is on the device; it gets jobs of these users only. Empty: it gets no job until "
        "an operator binds a user to it",
    ),
]
MAX_REFERENCE_TEXTS = 100  # of a base
MAX_REFERENCE_TEXT = 1_000  # characters of one
ReferenceTexts = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_REFERENCE_TEXT)], ...],
    Field(min_length=1, max_length=MAX_REFERENCE_TEXTS),
]


class ServerInfo(StrictModel):
    """The server's version and its public signing key, which a device pins when it enrolls."""

    name: str = "mobizo"
    version: str
    public_key: str = Field(description="Ed25519, base64: signs manifests")
    key_id: str


class ServerUsage(StrictModel):
    """Peak resident memory of the server's processes since it started, bytes; `peak_rss_bytes` is their maximum."""

    peak_rss_bytes: int
    server_peak_rss_bytes: int
    worker_peak_rss_bytes: int
    compiler_peak_rss_bytes: int


class Page(StrictModel, Generic[Item]):
    """One page of a list, newest first; `next` is the cursor of the page after it."""

    items: list[Item]
    next: str | None = None


class EnrollmentRequest(StrictModel):
    """Request for a one-time token that enrolls one device."""

    expires_in_seconds: int = Field(3600, ge=1, le=30 * 24 * 3600)
    users: Users = Field([])


class Enrollment(StrictModel):
    """A one-time enrollment token. It is shown only in this response."""

    token: str
    expires_at: datetime


class DeviceEnrollment(StrictModel):
    """A device's enrollment request. The one-time token is sent as its bearer token."""

    name: str = Field(pattern=NAME)
    public_key: str = Field(max_length=100, description="the device's own Ed25519 key, base64")
    platform: str = Field(max_length=200)


class DeviceGrant(StrictModel):
    """The credentials of a newly enrolled device. The token is shown only in this response."""

    device_id: str
    token: str
    server: ServerInfo


class DeviceView(StrictModel):
    """A device as an operator sees it."""

    id: str
    name: str
    platform: str
    created_at: datetime
    last_seen_at: datetime | None = Field(description="time of the last request, accurate to about a minute")
    revoked_at: datetime | None = None
    labels: Labels = Field(default_factory=dict, description="labels set by an operator")
    users: list[str] = Field(default_factory=list, description="users whose jobs the device may train")
    datasets: list[str] = Field(default_factory=list, description="names of the data sets that the device reported")
    memory_bytes: int | None = Field(None, description="memory that the device reported as available, bytes")
    capabilities: Capabilities | None = Field(
        None, description="capabilities that the device reported; null: none reported"
    )
    failures: int = Field(0, description="consecutive jobs that the device did not finish")
    cooldown_until: datetime | None = Field(
        None, description="the device gets no new job before this time, after too many failures"
    )


class DeviceChange(StrictModel):
    """An operator's change to a device."""

    labels: dict[LabelName, LabelValue | None] = Field(
        max_length=32, description="labels to set; null removes a label; other labels stay unchanged"
    )


class LeaseRequest(StrictModel):
    """A device's request for a job that it can train."""

    datasets: list[Annotated[str, Field(max_length=200)]] = Field(
        max_length=1000, description="names of the data sets on the device"
    )
    wait_seconds: FiniteFloat = Field(0, ge=0, le=30, description="how long the server may hold the request")
    memory_bytes: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="available memory, bytes; jobs declined for lack of memory are left out; null: unknown",
    )
    capabilities: Capabilities | None = Field(
        None, description="capabilities of the device; null: not reported (agents of earlier releases)"
    )
    lease_seconds: FiniteFloat | None = Field(
        None,
        gt=0,
        description="requested lease duration without a heartbeat; the server caps it",
    )


class Lease(StrictModel):
    """One job, leased to one device until `expires_at`. Heartbeats extend the lease."""

    id: str
    job: JobView
    manifest: SignedManifest
    start: SignedAdapter | None = Field(
        None, description="adapter version that the run starts from; `/start` serves its LoRA-B; null: B = 0"
    )
    starts: tuple[SignedAdapter, ...] = Field(
        (),
        exclude_if=lambda value: not value,  # agents of earlier releases refuse a field that they do not know
        description="of a job with start `auto`: versions among which, and B = 0, the device chooses",
    )
    round: RoundTask | None = Field(
        None,
        exclude_if=lambda value: value is None,  # agents of earlier releases refuse a field that they do not know
        description="the federated round that the job belongs to, and its settings; null: none",
    )
    reference_texts: ReferenceTexts | None = Field(
        None,
        exclude_if=lambda value: value is None,  # as above
        description="public texts whose loss the device measures before and after training; null: the agent's own, "
        "which are English",
    )
    expires_at: datetime


class LeaseState(StrictModel):
    """The state of a lease after a request from its device."""

    job_state: JobState
    expires_at: datetime
    stop: bool = Field(description="the job was cancelled; stop training and discard it")


class JobWaiting(StrictModel):
    """Why a job is waiting, in words for a person."""

    state: JobState
    why: str
    ahead: int | None = Field(None, description="ready jobs ahead of it with the same device requirements")
    devices: int | None = Field(None, description="devices bound to the job's user that were considered")
    eligible: int | None = Field(None, description="devices among these that may take the job")


class Decline(StrictModel):
    """The memory that a job's program needs and that the device has, so that the server may offer a smaller recipe."""

    needed_bytes: int = Field(ge=0, lt=2**63, description="weights and planned memory")
    available_bytes: int = Field(ge=0, lt=2**63, description="memory that is available on the device")


class ChosenStart(StrictModel):
    """The start that a device has chosen for a job with start `auto`."""

    start: JobStart | None = Field(description="one of the lease's `starts`, by its full revision; null: B = 0")


class UploadReceipt(StrictModel):
    """Confirms that the server has validated and stored these bytes."""

    sha256: Sha256
    size: int


class Completion(StrictModel):
    """Ends a lease and names the adapter that was uploaded before.

    Sending it twice has the effect of sending it once.
    """

    adapter_sha256: Sha256 = Field(
        description="sha256 of the LoRA-B file; the file may be omitted if a trajectory is uploaded for replay"
    )
    trajectory_sha256: Sha256 | None = Field(
        None, description="sha256 of the uploaded trajectory; null: none was uploaded"
    )
    result: Result


class AdapterVersion(StrictModel):
    """One immutable version of an adapter."""

    adapter: str
    version: int
    job_id: str | None = Field(description="null: a cohort's round made it")
    device_id: str | None = Field(description="null: a cohort's round made it")
    recipe: Recipe
    recipe_id: str
    a_sha256: Sha256
    sha256: Sha256 = Field(description="of the LoRA-B safetensors file")
    size: int
    size_d: int = Field(description="D: elements of flat B")
    result: Result
    verified: bool = Field(False, description="the server replayed the run's trajectory and got this B, bit for bit")
    created_at: datetime
    revision: str = Field(description="first 40 hexadecimal digits of the manifest's sha256")
    parent: Parent | None = Field(None, description="the version that training began from; null: B = 0")
    cohort: CohortOrigin | None = Field(
        None, exclude_if=lambda value: value is None, description="the round that made it; null: one device trained it"
    )
    state: VersionState = VersionState.APPROVED
    message: str = Field("", description="why it is held, deprecated or deleted")
    removed_after: datetime | None = Field(None, description="time after which a deleted version is purged")


class TrajectoryView(StrictModel):
    """The trajectory that was uploaded with a version."""

    adapter: str
    version: int
    sha256: Sha256
    size: int
    steps: int = Field(description="number of steps; any of them can be reconstructed if verified")
    verified: bool
    replaces_weights: bool = Field(
        description="the trajectory is stored instead of the LoRA-B file, which is reconstructed on request"
    )
    start_sha256: Sha256 | None = Field(description="sha256 of the LoRA-B file that the run started from; null: B = 0")


class AdapterView(StrictModel):
    """An adapter with its latest version."""

    name: str
    user: str
    versions: int = Field(description="number of versions created so far; numbers are never reused")
    latest: AdapterVersion | None = Field(description="latest version, held or approved; null: all were deleted")
    main: int | None = Field(None, description="the version that is `main`; null: none was approved")
    created_at: datetime
    removed_after: datetime | None = Field(None, description="time after which a deleted adapter is purged")


class DeviceAdapter(StrictModel):
    """An adapter version that a device may download, and the program that runs it."""

    adapter: SignedAdapter
    program: SignedManifest


class PeftFile(StrictModel):
    """One file of a PEFT directory."""

    path: str
    size: int
    sha256: Sha256


class PeftListing(StrictModel):
    """The files of an adapter version exported as a PEFT directory."""

    adapter: str
    version: int
    files: list[PeftFile]
