"""Every error that mobizo raises, with its HTTP status and its RFC 9457 problem document.

MobizoError
|- BadRequest           400   the request, file or option itself is wrong
|  |- InvalidRequest    422     a body or parameter that the API description does not allow
|  |- InvalidRecipe     422     a recipe that cannot be compiled
|  |- UnknownBase       404     a base model that is not registered
|  |- UnreadableCheckpoint 422  model files that are damaged or of an unknown form
|  |- UnsupportedModel  422     an architecture or feature the compiler cannot map exactly
|  |- ToolchainMissing  422     a backend whose tools this server does not have
|  |- InvalidTask       422     a task with an unusable template or answers
|  |- InvalidDataset    422     a data file with a bad line (named, with its line)
|  |- InvalidUpload     422     an adapter file that does not fit its program
|  |  |- InvalidTrajectory 422  a trajectory that is damaged or of another run
|  |  |- TrajectoryMismatch 422 a trajectory whose replay gives another adapter
|  |  |- CohortMismatch  422    an update with another A or base than its cohort's
|  |  `- InvalidUpdate   422    an update that its round does not accept
|  |- StartMismatch     422     a job whose program does not fit the adapter version that it starts from
|  |- UnsupportedFormat 422     a format that this adapter cannot be converted to exactly
|  `- DigestMismatch    400     a body that does not match its Content-Digest
|- Unauthorized         401   no valid token
|  |- BadSignature      401     a device's request without a valid signature
|  `- ClockSkew         401     a signature whose time differs too much from the server's clock
|- Forbidden            403   a valid token without the required permission
|  |- TenantSuspended   403   a valid token of a suspended tenant
|  `- NotAMember        403   an update of a user who has left the cohort
|- NotFound             404   absent, or owned by another tenant
|  |- AdapterNotFound   404     an adapter that does not exist or was deleted
|  |- CohortNotFound    404     a cohort that does not exist
|  |- RoundNotFound     404     a round that does not exist
|  |- RevisionNotFound  404     a version or revision that does not exist
|  `- FileNotInAdapter  404     a file that the version does not have
|- Conflict             409   the state of the resource does not allow this
|  |- VersionHeld       409     an adapter version that waits for approval
|  |- StartDeleted      409     the adapter version that a job starts from was deleted
|  |- BudgetExceeded    409     a private job or round that would exceed the privacy budget
|  |- DeviceNotBound    409     a device that does not train for this user
|  |- QuotaExceeded     409     something of which the tenant has as much as it may have
|  |- NotReplayable     409     a version whose earlier steps cannot be reconstructed
|  |- LeftOutOfRound    409     a secure aggregation round that continues without this device
|  `- ReplayedRequest          409     a signed request whose nonce was used before
|- Gone                 410   a lease that ended
|  `- RoundClosed       410   an update after the end of its round
|- TooSlow              408   a body that took too long to arrive
|- TooLarge             413   a body over its limit
|- TooManyRequests      429   the rate limit of this token or address is exceeded
|- Untrusted            -     a signature or hash that does not match
|  |- AMismatch          -     another frozen A than the one that B was trained with
|  `- BaseMismatch       -     other base model files than those that the adapter was trained on
|- Unavailable          503   the server (or its disk) cannot serve right now
`- CompileFailed        500   the compiler stopped
   `- CompileTooLarge   500   it would need more memory than any worker has
"""

from __future__ import annotations

from typing import Any, ClassVar

PROBLEM_TYPE = "urn:mobizo:problem:"
_STANDARD = frozenset({"type", "title", "status", "detail", "code", "instance"})


class MobizoError(Exception):
    """Something went wrong inside mobizo; the server's log has the details."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str | None = None, **extra: Any) -> None:
        """`detail`: what happened and what to do, in one or two sentences. The default is the class docstring.

        `extra`: JSON-serializable members added to the problem document.
        """
        self.detail = detail or (type(self).__doc__ or self.title).split("\n")[0].strip()
        self.extra = extra
        super().__init__(self.detail)

    def problem(self, instance: str | None = None) -> dict[str, Any]:
        """Returns the RFC 9457 problem document, ready for JSON."""
        document = {
            "type": PROBLEM_TYPE + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            **self.extra,
        }
        return document if instance is None else document | {"instance": instance}


class BadRequest(MobizoError):
    """The request is malformed; compare it with the API description at /docs."""

    status, code, title = 400, "bad-request", "Bad request"


class InvalidRequest(BadRequest):
    """The request does not match the API description at /docs; correct the named fields."""

    status, code, title = 422, "invalid-request", "Invalid request"


class InvalidRecipe(BadRequest):
    """The recipe cannot be compiled; correct the named field."""

    status, code, title = 422, "invalid-recipe", "Invalid recipe"


class UnknownBase(BadRequest):
    """No base model with this name is registered; `mobizo-server base list` shows the registered ones."""

    status, code, title = 404, "unknown-base", "Unknown base model"


class UnreadableCheckpoint(BadRequest):
    """The model files are damaged or incomplete; download them again."""

    status, code, title = 422, "unreadable-checkpoint", "Unreadable checkpoint"


class UnsupportedModel(BadRequest):
    """The compiler cannot map this architecture exactly; choose a supported one."""

    status, code, title = 422, "unsupported-model", "Unsupported model"


class ToolchainMissing(BadRequest):
    """This server does not have the tools that the recipe's backend needs; install them or choose another backend."""

    status, code, title = 422, "toolchain-missing", "Toolchain missing"


class InvalidTask(BadRequest):
    """The task's template or answers cannot be used; correct the named part."""

    status, code, title = 422, "invalid-task", "Invalid task"


class InvalidDataset(BadRequest):
    """A data file contains an invalid line; correct the named line."""

    status, code, title = 422, "invalid-dataset", "Invalid dataset"


class InvalidUpload(BadRequest):
    """The uploaded adapter does not fit its program; nothing was stored."""

    status, code, title = 422, "invalid-upload", "Invalid upload"


class InvalidTrajectory(InvalidUpload):
    """The trajectory is damaged or belongs to another run; nothing was stored."""

    code, title = "invalid-trajectory", "Invalid trajectory"


class TrajectoryMismatch(InvalidUpload):
    """Replaying the trajectory yields a different adapter than the uploaded one; send the adapter without it."""

    code, title = "trajectory-mismatch", "Trajectory mismatch"


class CohortMismatch(InvalidUpload):
    """The update was not trained with the cohort's base and frozen A; nothing was stored."""

    code, title = "cohort-mismatch", "Cohort mismatch"


class InvalidUpdate(InvalidUpload):
    """The round does not accept this update; nothing was stored."""

    code, title = "invalid-update", "Invalid update"


class StartMismatch(BadRequest):
    """The job cannot continue from this adapter version; use the recipe of that version."""

    status, code, title = 422, "start-mismatch", "Start mismatch"


class UnsupportedFormat(BadRequest):
    """This adapter cannot be converted exactly to the requested format; choose another format."""

    status, code, title = 422, "unsupported-format", "Unsupported format"


class Unauthorized(MobizoError):
    """A valid token is required: send `Authorization: Bearer TOKEN`."""

    status, code, title = 401, "unauthorized", "Unauthorized"


class BadSignature(Unauthorized):
    """The signature does not match the request and this device's key; if the key was lost, enroll the device again."""

    code, title = "bad-signature", "Bad signature"


class ClockSkew(Unauthorized):
    """The signature's time differs too much from the server's clock; sign again with the server time given here."""

    code, title = "clock-skew", "Clock skew"


class DigestMismatch(BadRequest):
    """The body does not match its Content-Digest and was discarded; send it again."""

    code, title = "digest-mismatch", "Digest mismatch"


class Forbidden(MobizoError):
    """This token does not have the required permission; ask the operator for a token that has it."""

    status, code, title = 403, "forbidden", "Forbidden"


class TenantSuspended(Forbidden):
    """The tenant is suspended, so its tokens are rejected; ask the operator of the server."""

    code, title = "tenant-suspended", "Tenant suspended"


class NotAMember(Forbidden):
    """The user has left the cohort; the update is discarded."""

    code, title = "not-a-member", "Not a member"


class NotFound(MobizoError):
    """The resource does not exist, or it belongs to another tenant."""

    status, code, title = 404, "not-found", "Not found"


class AdapterNotFound(NotFound):
    """The adapter does not exist, or it belongs to another tenant."""

    code, title = "adapter-not-found", "Adapter not found"


class CohortNotFound(NotFound):
    """The cohort does not exist, or it belongs to another tenant."""

    code, title = "cohort-not-found", "Cohort not found"


class RoundNotFound(NotFound):
    """The cohort has no round with this number."""

    code, title = "round-not-found", "Round not found"


class RevisionNotFound(NotFound):
    """The adapter does not have this version or revision."""

    code, title = "revision-not-found", "Revision not found"


class FileNotInAdapter(NotFound):
    """The version has no file with this name."""

    code, title = "file-not-in-adapter", "File not in adapter"


class Conflict(MobizoError):
    """The current state of the resource does not allow this; fetch the resource and try again."""

    status, code, title = 409, "conflict", "Conflict"


class BudgetExceeded(Conflict):
    """This would exceed the privacy budget; request a smaller epsilon, or raise the budget."""

    code, title = "privacy-budget-exceeded", "Privacy budget exceeded"


class DeviceNotBound(Conflict):
    """The device does not train for this user; an operator binds the user to it with `mobizo device bind`."""

    code, title = "device-not-bound", "Device not bound to the user"


class QuotaExceeded(Conflict):
    """The tenant has as much as its quota allows; remove some, or ask the operator for a larger quota."""

    code, title = "quota-exceeded", "Quota exceeded"


class NotReplayable(Conflict):
    """The steps of this version cannot be reconstructed: it has no trajectory, or the trajectory was not verified."""

    code, title = "not-replayable", "Not replayable"


class VersionHeld(Conflict):
    """The adapter version waits for approval; approve it first."""

    code, title = "version-held", "Version held"


class StartDeleted(Conflict):
    """The adapter version that the job starts from was deleted; submit a job with another start."""

    code, title = "start-deleted", "Start deleted"


class LeftOutOfRound(Conflict):
    """The masked round continues without this device; the update is discarded."""

    code, title = "masking-out", "Out of a masked round"


class ReplayedRequest(Conflict):
    """The nonce of this request was used before; sign every attempt with a new nonce."""

    code, title = "replayed", "ReplayedRequest request"


class Gone(MobizoError):
    """The lease has ended and the job may be leased to another device; request a new lease."""

    status, code, title = 410, "lease-ended", "Lease ended"


class RoundClosed(Gone):
    """The round has ended; the update came too late."""

    code, title = "round-closed", "Round closed"


class TooSlow(MobizoError):
    """The body took too long to arrive; send it again, over a better connection."""

    status, code, title = 408, "too-slow", "Request timeout"


class TooLarge(MobizoError):
    """The body exceeds the size limit of this route; send a smaller body."""

    status, code, title = 413, "too-large", "Body too large"


class TooManyRequests(MobizoError):
    """The rate limit is exceeded; wait for the time given in Retry-After."""

    status, code, title = 429, "too-many-requests", "Too many requests"


class Untrusted(MobizoError):
    """A signature or hash does not match: the file was modified, or it comes from another server."""

    status, code, title = 422, "untrusted", "Untrusted content"


class AMismatch(Untrusted):
    """The frozen A differs from the one that this adapter was trained with; nothing was converted."""

    code, title = "a-mismatch", "Frozen A mismatch"


class BaseMismatch(Untrusted):
    """The base model differs from the one that this adapter was trained on; use the base named in its manifest."""

    code, title = "base-mismatch", "Base model mismatch"


class Unavailable(MobizoError):
    """The server cannot serve this right now; try again later."""

    status, code, title = 503, "unavailable", "Unavailable"


class CompileFailed(MobizoError):
    """The compiler stopped; the server's log has its output."""

    status, code, title = 500, "compile-failed", "Compilation failed"


class CompileTooLarge(CompileFailed):
    """The compilation needs more memory than any worker machine may use; raise MOBIZO_COMPILE_BUDGET_BYTES."""

    status, code, title = 500, "compile-too-large", "Compilation too large"


def _tree(root: type[MobizoError]) -> dict[str, type[MobizoError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


def from_problem(document: dict[str, Any]) -> MobizoError:
    """Returns the error that a document describes, so that a client raises the server's error class.

    document: a problem document, or an error of OpenAI's routes.
    """
    if isinstance(openai_error := document.get("error"), dict):
        document = {"code": openai_error.get("code"), "detail": openai_error.get("message")}
    classes = _tree(MobizoError)
    code = document.get("code", MobizoError.code)
    detail = str(document.get("detail") or document.get("title") or "the server gave no reason")
    error = classes.get(code, MobizoError)(detail)
    error.extra = {name: value for name, value in document.items() if name not in _STANDARD}
    return error
