"""What server, device and client say to each other besides jobs and programs. Bodies are JSON unless said otherwise.

    GET  /v1/server                                        -> ServerInfo           anyone
    GET  /v1/server/keys                                   -> ServerKeys           anyone (shared.succession)
    GET  /v1/server/usage                                  -> ServerUsage          operator
    GET  /v1/whoami                                        -> access.WhoAmI        anyone with a token
    GET  /v1/tokens                                        -> Page of access.TokenView   operator
    POST /v1/tokens                access.TokenRequest     -> 201 access.TokenGrant      operator
    POST /v1/tokens/{id}/rotate                            -> 201 access.TokenGrant      operator
    DELETE /v1/tokens/{id}                                 -> 204                        operator
    POST /v1/enrolments            EnrolmentRequest        -> Enrolment            operator
    POST /v1/devices               DeviceEnrol             -> DeviceGrant          bearer of the one-time token
    GET  /v1/devices                                       -> Page of DeviceView   operator
    GET  /v1/devices/{id}                                  -> DeviceView           operator
    PATCH /v1/devices/{id}         DeviceChange            -> DeviceView           operator
    POST /v1/oauth/device_authorization  form              -> DeviceAuthorization  anyone (RFC 8628)
    POST /v1/oauth/token           form                    -> DeviceToken          anyone (RFC 8628)
    GET  /device                   ?user_code=             -> HTML                 anyone
    GET  /v1/device-requests/{user_code}                   -> DeviceRequestView    operator
    POST /v1/device-requests/{user_code}/approve           -> DeviceRequestView    operator
    POST /v1/device-requests/{user_code}/deny              -> DeviceRequestView    operator
    POST /v1/jobs                  JobRequest              -> 202 JobView          app
    GET  /v1/jobs                                          -> Page of JobView      app
    GET  /v1/jobs/{id}                                     -> JobView              app
    GET  /v1/jobs/{id}/waiting                             -> JobWaiting           app
    POST /v1/jobs/{id}/cancel                              -> JobView              app
    GET  /v1/jobs/{id}/events                              -> text/event-stream of JobView and Progress    app
    POST /v1/leases                LeaseRequest            -> 200 Lease | 204      device
    POST /v1/leases/{id}/heartbeat Progress                -> LeaseState           device
    POST /v1/leases/{id}/fail      JobError                -> LeaseState           device
    POST /v1/leases/{id}/release                           -> LeaseState           device (gives the job back)
    POST /v1/leases/{id}/leave                             -> LeaseState           device (stops; may be back soon)
    POST /v1/leases/{id}/decline   Decline                 -> LeaseState           device (its memory is too small)
    PUT  /v1/leases/{id}/adapter   safetensors             -> UploadReceipt        device
    PUT  /v1/leases/{id}/trajectory  shared.trajectory     -> UploadReceipt        device (if its owner allows it)
    GET  /v1/leases/{id}/start     Range, strong ETag      -> bytes                device
    POST /v1/leases/{id}/complete  Completion              -> AdapterVersion       device
    GET  /v1/programs/{recipe_id}                          -> SignedManifest       app
    GET  /v1/files/{sha256}        Range, strong ETag      -> bytes                device, app
    GET  /v1/runners/{platform}                            -> SignedRunner         device
    GET  /v1/runners/{platform}/{sha256}  Range, ETag      -> bytes                device
    GET  /v1/adapters                                      -> Page of AdapterView  app
    GET  /v1/adapters/{name}                               -> AdapterView          app
    DELETE /v1/adapters/{name}     ?reason=                -> AdapterView          app
    POST /v1/adapters/{name}/undelete  registry.Decision   -> AdapterView          app
    POST /v1/adapters/{name}/promote   registry.Promotion  -> AdapterView          app
    POST /v1/adapters/{name}/rollback  registry.Rollback   -> AdapterView          app
    PUT  /v1/adapters/{name}/tags/{tag}  registry.Tagging  -> AdapterView          app
    DELETE /v1/adapters/{name}/tags/{tag}  ?reason=        -> AdapterView          app
    GET  /v1/adapters/{name}/events                        -> Page of registry.AdapterEvent        app
    GET  /v1/adapters/{name}/compare  ?left=&right=&other= -> registry.Comparison  app
    GET  /v1/adapters/{name}/rule                          -> registry.RuleView    app
    PUT  /v1/adapters/{name}/rule  registry.RuleChange     -> registry.RuleView    app
    GET  /v1/approval-rule                                 -> registry.RuleView    app
    PUT  /v1/approval-rule         registry.RuleChange     -> registry.RuleView    app
    GET  /v1/adapters/{name}/revisions/{revision}          -> AdapterVersion       app
    GET  /v1/adapters/{name}/versions  ?state=             -> Page of AdapterVersion               app
    GET  /v1/adapters/{name}/versions/{version}            -> AdapterVersion       app
    DELETE /v1/adapters/{name}/versions/{version}  ?reason=       -> AdapterVersion                app
    POST /v1/adapters/{name}/versions/{version}/undelete   registry.Decision     -> AdapterVersion  app
    POST /v1/adapters/{name}/versions/{version}/approve    registry.Decision     -> AdapterVersion  app
    POST /v1/adapters/{name}/versions/{version}/reject     registry.Decision     -> AdapterVersion  app
    POST /v1/adapters/{name}/versions/{version}/deprecate  registry.Deprecation  -> AdapterVersion  app
    GET  /v1/adapters/{name}/versions/{version}/lora_B.safetensors  -> bytes       app
    GET  /v1/adapters/{name}/versions/{version}/trajectory -> TrajectoryView       app
    GET  /v1/adapters/{name}/versions/{version}/trajectory.bin      -> bytes       app
    GET  /v1/adapters/{name}/versions/{version}/steps/{step}/lora_B.safetensors    -> bytes       app
    GET  /v1/adapters/{name}/versions/{version}/peft       -> PeftListing          app
    GET  /v1/adapters/{name}/versions/{version}/peft/{file} -> bytes               app
    GET  /v1/adapters/{name}/devices                       -> Page of AssignmentView  app
    PUT  /v1/adapters/{name}/devices/{id}                  -> AssignmentView       app
    DELETE /v1/adapters/{name}/devices/{id}                -> 204                  app
    GET  /v1/devices/self/adapters/{name}/{revision}       -> DeviceAdapter        device (its own, or assigned)
    GET  /v1/devices/self/adapters/{name}/{revision}/lora_B.safetensors  -> bytes  device (its own, or assigned)
    POST /v1/adapters/{name}/versions/{version}/merged     -> MergedModel          app
    GET  /v1/adapters/{name}/versions/{version}/merged     -> MergedModel          app
    GET  /v1/adapters/{name}/versions/{version}/merged/{file} -> bytes             app
    GET  /v1/users/{user}/privacy                          -> privacy.UserPrivacy  app
    PUT  /v1/users/{user}/privacy  privacy.PrivacyBudget   -> privacy.UserPrivacy  operator
    GET  /v1/cohorts/{name}/privacy                        -> privacy.CohortPrivacy  app
    POST /v1/score                 scoring.ScoreRequest    -> scoring.ScoreResult  app
    POST /v1/generate              scoring.GenerateRequest -> scoring.GenerateResult, or text/event-stream    app
    GET  /healthz, /readyz                                                         anyone

What a device sends is signed, besides, by the key that it enrolled with (shared.request_signature).

Knows no HTTP library.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from shared.capabilities import Capabilities, LabelName, Labels, LabelValue
from shared.cohort import CohortOrigin, RoundTask
from shared.job import NAME, JobError, JobState, JobView, Result
from shared.program import SignedManifest
from shared.recipe import Recipe, Sha256
from shared.registry import Parent, SignedAdapter, VersionState

Item = TypeVar("Item")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ServerInfo(_Wire):
    """Who the server is: what a device pins when it enrols."""

    name: str = "mobizo"
    version: str
    public_key: str = Field(description="Ed25519, base64: signs manifests")
    key_id: str


class ServerUsage(_Wire):
    """Peak resident memory of the server's processes since it started, bytes; `peak_rss_bytes` is their maximum."""

    peak_rss_bytes: int
    server_peak_rss_bytes: int
    worker_peak_rss_bytes: int
    compiler_peak_rss_bytes: int


class Page(_Wire, Generic[Item]):
    """One page of a list, newest first; `next` is the cursor of the page after it."""

    items: list[Item]
    next: str | None = None


class EnrolmentRequest(_Wire):
    """Asks for a one-time token with which one device may enrol."""

    expires_in_seconds: int = Field(3600, ge=1, le=30 * 24 * 3600)


class Enrolment(_Wire):
    """The one-time token, shown once."""

    token: str
    expires_at: datetime


class DeviceEnrol(_Wire):
    """A device's first words; the one-time token travels as its bearer token."""

    name: str = Field(pattern=NAME)
    public_key: str = Field(max_length=100, description="the device's own Ed25519 key, base64")
    platform: str = Field(max_length=200)


class DeviceGrant(_Wire):
    """What a device needs from now on; the token is shown once."""

    device_id: str
    token: str
    server: ServerInfo


class DeviceAuthorization(BaseModel):
    """A request to join that waits for an operator (RFC 8628); what else a server says is passed over."""

    device_code: str = Field(description="the device's secret, with which it asks for its token")
    user_code: str = Field(description="what a person reads to an operator")
    verification_uri: str
    verification_uri_complete: str | None = None
    expires_in: int = Field(ge=1, description="seconds")
    interval: int = Field(5, ge=0, description="least seconds between two questions")


class DeviceToken(BaseModel):
    """What a device gets once an operator let it in: an OAuth token, and what `DeviceGrant` says besides."""

    access_token: str = Field(description="shown once")
    token_type: Literal["Bearer"] = "Bearer"  # noqa: S105  # OAuth's word, no password
    device_id: str
    server: ServerInfo


class DeviceRequestView(_Wire):
    """A device that asks to join, as the operator sees it who was told its code."""

    user_code: str
    name: str
    platform: str
    fingerprint: str = Field(description="of the device's public key; the device shows the same")
    address: str = Field(description="that it asked from, as the server sees it")
    state: Literal["pending", "approved", "denied", "used"]
    created_at: datetime
    expires_at: datetime
    device_id: str | None = Field(None, description="once it has joined")


class DeviceView(_Wire):
    """A device as the operator sees it."""

    id: str
    name: str
    platform: str
    created_at: datetime
    last_seen_at: datetime | None = Field(description="to about a minute")
    revoked_at: datetime | None = None
    labels: Labels = Field(default_factory=dict, description="that an operator gave it")
    datasets: list[str] = Field(default_factory=list, description="that it said it holds")
    memory_bytes: int | None = Field(None, description="what it said it can spare")
    capabilities: Capabilities | None = Field(None, description="what it said it can do; null: an agent that does not")
    failures: int = Field(0, description="jobs in a row that it did not finish")
    rests_until: datetime | None = Field(None, description="gets no new job before, for too many of these")


class DeviceChange(_Wire):
    """What an operator changes of a device."""

    labels: dict[LabelName, LabelValue | None] = Field(
        max_length=32, description="set to these values, and removed where null; others stay"
    )


class LeaseRequest(_Wire):
    """Asks for a job that this device can train."""

    datasets: list[str] = Field(max_length=1000, description="names of the data sets it holds")
    wait_seconds: float = Field(
        0, ge=0, le=30, allow_inf_nan=False, description="how long the server may hold the request"
    )
    memory_bytes: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="what it can spare: jobs it declined for want of more are left out; null: unsaid",
    )
    capabilities: Capabilities | None = Field(None, description="what it can do; null: unsaid, as by old agents")
    lease_seconds: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="how long it would keep the job without a heartbeat; the server gives no more than its own most",
    )


class Lease(_Wire):
    """One job, for one device, until `expires_at` unless heartbeats extend it."""

    id: str
    job: JobView
    manifest: SignedManifest
    start: SignedAdapter | None = Field(
        None, description="whose LoRA-B the run begins from, which `/start` sends; null: B = 0"
    )
    round: RoundTask | None = Field(
        None,
        exclude_if=lambda value: value is None,  # agents of earlier releases refuse a field that they do not know
        description="what the job's round asks of the device beside plain training; null: the job is of no round",
    )
    expires_at: datetime


class LeaseState(_Wire):
    """How a lease stands after the server heard from the device."""

    job_state: JobState
    expires_at: datetime
    stop: bool = Field(description="the job was cancelled: stop training and forget it")


class JobWaiting(_Wire):
    """Why a job does not go on, for people."""

    state: JobState
    why: str
    ahead: int | None = Field(None, description="ready jobs before it that ask for the same of a device")
    devices: int | None = Field(None, description="devices enrolled in the tenant that were looked at")
    able: int | None = Field(None, description="of these, the ones that may take it")


class Decline(_Wire):
    """Why a device cannot hold a job's program, with which the server may offer a smaller one."""

    needed_bytes: int = Field(ge=0, lt=2**63, description="weights and planned memory")
    available_bytes: int = Field(ge=0, lt=2**63, description="what the device can spare")


class RunnerBuild(_Wire):
    """The native runner built for one platform: a .tar.gz of `mobizo-runner` and the libraries beside it."""

    format: Literal[1] = 1
    platform: str = Field(pattern=r"^[a-z0-9]+-[a-z0-9_]+$", description="system and machine, such as linux-aarch64")
    version: str = Field(max_length=50, description="of mobizo; the runner serves agents of the same")
    executorch: str = Field(max_length=50)
    size: int = Field(ge=1)
    sha256: Sha256


class SignedRunner(_Wire):
    """A runner build and the server's Ed25519 signature over its canonical JSON."""

    build: RunnerBuild
    key_id: str
    signature: str = Field(description="Ed25519, base64")


class CalibrationView(_Wire):
    """A calibration that recipes of its base model may take A from, at any rank up to its width."""

    sha256: Sha256 = Field(description="of its file; what a recipe names")
    base: str = Field(description="name of the base model that it was made for")
    kind: str = Field(description="gradients or activations")
    task: str = Field(description="name of the task that made records into prompts")
    examples: int = Field(description="records that it was made of")
    modules: int = Field(description="linear layers that it covers")
    width: int = Field(description="directions for each; the largest rank that it serves")
    size: int = Field(description="bytes")
    created_at: datetime


class UploadReceipt(_Wire):
    """The server holds these bytes, validated."""

    sha256: Sha256
    size: int


class Completion(_Wire):
    """Ends a lease with the adapter uploaded before; sent twice, it counts once."""

    adapter_sha256: Sha256 = Field(
        description="of the LoRA-B file; with a trajectory that is replayed, it need not be uploaded"
    )
    trajectory_sha256: Sha256 | None = Field(None, description="of the trajectory uploaded before; null: none is sent")
    result: Result


class AdapterVersion(_Wire):
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
    revision: str | None = Field(None, description="what its manifest's sha256 begins with; null: not signed yet")
    parent: Parent | None = Field(None, description="the version that training began from; null: B = 0")
    cohort: CohortOrigin | None = Field(
        None, exclude_if=lambda value: value is None, description="the round that made it; null: one device trained it"
    )
    state: VersionState = VersionState.APPROVED
    message: str = Field("", description="why it is held, deprecated or deleted")
    removed_after: datetime | None = Field(None, description="when a deleted version is lost for good")


class TrajectoryView(_Wire):
    """The trajectory that came with a version."""

    adapter: str
    version: int
    sha256: Sha256
    size: int
    steps: int = Field(description="of the run; any of them can be made again if it is verified")
    verified: bool
    instead: bool = Field(description="it is kept in place of the LoRA-B file, which is made of it when asked for")
    start_sha256: Sha256 | None = Field(description="LoRA-B file that the run started from; null: B = 0")


class AdapterView(_Wire):
    """An adapter with its latest version."""

    name: str
    user: str
    versions: int = Field(description="how many there were; their numbers are never given again")
    latest: AdapterVersion | None = Field(description="held or not; null: all were deleted")
    main: int | None = Field(None, description="the version that is `main`; null: none was approved")
    tags: dict[str, int] = Field(default_factory=dict, description="versions by the tags on them")
    created_at: datetime
    removed_after: datetime | None = Field(None, description="when a deleted adapter is lost for good")


class AssignmentView(_Wire):
    """That a device may have an adapter's published versions."""

    adapter: str
    device_id: str
    assigned_at: datetime


class DeviceAdapter(_Wire):
    """An adapter version for use on a device, and the program that runs it."""

    adapter: SignedAdapter
    program: SignedManifest


class PeftFile(_Wire):
    """One file of a PEFT directory."""

    path: str
    size: int
    sha256: Sha256


class PeftListing(_Wire):
    """The files that make one adapter version a PEFT directory."""

    adapter: str
    version: int
    files: list[PeftFile]


class ConversionState(StrEnum):
    """Where a conversion stands."""

    PENDING = "pending"  # waits for a worker
    CONVERTING = "converting"
    READY = "ready"
    FAILED = "failed"


class MergedModel(_Wire):
    """A version merged into its base model: a Hugging Face directory that needs no PEFT, made by a worker."""

    adapter: str
    version: int
    state: ConversionState
    files: list[PeftFile] = Field(description="empty until it is ready")
    error: JobError | None = Field(None, description="why it failed; asked for again, it is tried again")
    created_at: datetime
    ready_at: datetime | None = None
