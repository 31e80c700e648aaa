"""Every error the product raises on purpose, and its RFC 9457 form. Knows no HTTP library.

MobizoError
|- BadRequest           400   the request, file or option itself is wrong
|  |- InvalidRecipe     422     a recipe that cannot be compiled
|  |- UnknownBase       404     a base model the server was not given
|  |- UnreadableCheckpoint 422  model files that are damaged or of an unknown form
|  |- UnsupportedModel  422     an architecture or feature the compiler cannot map exactly
|  |- ToolchainMissing  422     a backend whose tools this server does not have
|  |- InvalidTask       422     a task whose template or answers cannot be used
|  |- InvalidDataset    422     a data file with a bad line (named, with its line)
|  |- InvalidUpload     422     an adapter file that does not fit its program
|  |  |- InvalidTrajectory 422  a ledger that is damaged, or not of this job's run
|  |  |- TrajectoryMismatch 422 a ledger that does not yield the adapter that it came with
|  |  |- CohortMismatch  422    an update whose A, or base, is not its cohort's
|  |  `- InvalidUpdate   422    an update that may not count in its round
|  |- StartMismatch     422     a job whose program cannot go on from the adapter version that it names
|  |- UnsupportedFormat 422     a format that this adapter cannot be converted to exactly
|  `- DigestMismatch    400     a body that is not what its Content-Digest says
|- Unauthorized         401   no valid token
|  |- BadSignature      401     a device's request that its key did not sign as it stands
|  `- ClockSkew         401     a signature made too long ago, or in the future, by the server's clock
|- Forbidden            403   a valid token that may not do this
|  |- TenantSuspended   403   a valid token of a tenant that is shut out for now
|  `- NotAMember        403   an update of a user who is not in the cohort any more
|- NotFound             404   absent, or another tenant's
|  |- AdapterNotFound   404     an adapter that the tenant has not, or has deleted
|  |- CohortNotFound    404     a cohort that the tenant has not
|  |- RoundNotFound     404     a round that a cohort has not had
|  |- RevisionNotFound  404     a version, tag or revision that an adapter has not
|  `- FileNotInAdapter  404     a file that no version of that kind has
|- Conflict             409   the thing is not in a state that allows this
|  |- VersionHeld       409     an adapter version that waits for a person's approval
|  |- StartDeleted      409     a job goes on from an adapter version that is there no more
|  |- BudgetExceeded    409     a private job, or round, that would cost more than is allowed to be spent
|  |- NotReplayable     409     a version whose earlier steps cannot be made again
|  |- MaskingOut        409     a masked round that goes on without this device
|  `- Replayed          409     a signed request that came before
|- Gone                 410   a lease that ended
|  `- RoundClosed       410   an update that came after its round had ended
|- TooLarge             413   a body over its limit
|- TooManyRequests      429   more requests than this token or address may make
|- Untrusted            -     a signature or hash that does not match
|  |- AMismatch          -     a frozen A that is not the one that B was trained with
|  `- BaseMismatch       -     a base model whose files are not those that the adapter was trained on
|- Unavailable          503   the server (or its disk) cannot serve right now
|- CompileFailed        500   the compiler stopped
|  `- CompileTooLarge   500   it would take more memory than any worker's machine may give
`- ConversionFailed     500   the conversion of an adapter stopped
   `- ConversionTooLarge 500  it would take more memory than any worker's machine may give
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
        """`detail`: what happened and what to do, one or two sentences; the class docstring is the default.

        `extra`: JSON-serialisable members added to the problem document.
        """
        self.detail = detail or (type(self).__doc__ or self.title).split("\n")[0].strip()
        self.extra = extra
        super().__init__(self.detail)

    def problem(self, instance: str | None = None) -> dict[str, Any]:
        """The RFC 9457 problem document, ready for JSON."""
        document: dict[str, Any] = {
            "type": PROBLEM_TYPE + self.code,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            **self.extra,
        }
        if instance is not None:
            document["instance"] = instance
        return document


class BadRequest(MobizoError):
    """The request cannot be understood; compare it with the API's description at /docs."""

    status, code, title = 400, "bad-request", "Bad request"


class InvalidRequest(BadRequest):
    """The request does not have the form that /docs describes; correct the named fields."""

    status, code, title = 422, "invalid-request", "Invalid request"


class InvalidRecipe(BadRequest):
    """The recipe cannot be compiled; correct the named field."""

    status, code, title = 422, "invalid-recipe", "Invalid recipe"


class UnknownBase(BadRequest):
    """No base model of that name is registered; `mobizo-server bases list` shows those that are."""

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
    """A data file has a line that cannot be used; correct the named line."""

    status, code, title = 422, "invalid-dataset", "Invalid dataset"


class InvalidUpload(BadRequest):
    """The uploaded adapter does not fit its program; nothing was stored."""

    status, code, title = 422, "invalid-upload", "Invalid upload"


class InvalidTrajectory(InvalidUpload):
    """The trajectory is damaged, or is not that of this job's run; nothing was stored."""

    code, title = "invalid-trajectory", "Invalid trajectory"


class TrajectoryMismatch(InvalidUpload):
    """Replayed, the trajectory yields another adapter than the one it came with; send that adapter without it."""

    code, title = "trajectory-mismatch", "Trajectory mismatch"


class CohortMismatch(InvalidUpload):
    """The update was not trained with the cohort's base and frozen A; nothing was stored."""

    code, title = "cohort-mismatch", "Not of this cohort"


class InvalidUpdate(InvalidUpload):
    """The update may not count in its round; nothing was stored."""

    code, title = "invalid-update", "Invalid update"


class StartMismatch(BadRequest):
    """A run of this job cannot go on from that adapter version; give it the version's own recipe."""

    status, code, title = 422, "start-mismatch", "Start does not fit"


class UnsupportedFormat(BadRequest):
    """This adapter cannot be converted to that format exactly; take another format."""

    status, code, title = 422, "unsupported-format", "Unsupported format"


class Unauthorized(MobizoError):
    """A valid token is needed: send `Authorization: Bearer TOKEN`."""

    status, code, title = 401, "unauthorized", "Unauthorized"


class BadSignature(Unauthorized):
    """The request is not signed by this device's key as it stands; enrol this device again if its key was lost."""

    code, title = "bad-signature", "Bad signature"


class ClockSkew(Unauthorized):
    """The signature's time is too far from the server's; sign again by the time that is told here."""

    code, title = "clock-skew", "Clock skew"


class DigestMismatch(BadRequest):
    """The body is not what its Content-Digest says; it was changed on the way, and nothing of it was kept."""

    code, title = "digest-mismatch", "Digest mismatch"


class Forbidden(MobizoError):
    """This token may not do that; ask the operator for one that may."""

    status, code, title = 403, "forbidden", "Forbidden"


class TenantSuspended(Forbidden):
    """The tenant is suspended: its tokens open nothing for now; ask whoever runs the server."""

    code, title = "tenant-suspended", "Tenant suspended"


class NotAMember(Forbidden):
    """The user has left the cohort; what his device trained does not count."""

    code, title = "not-a-member", "Not a member"


class NotFound(MobizoError):
    """There is no such thing here, or it is not yours."""

    status, code, title = 404, "not-found", "Not found"


class AdapterNotFound(NotFound):
    """There is no adapter of that name here, or it is not yours."""

    code, title = "adapter-not-found", "Adapter not found"


class CohortNotFound(NotFound):
    """There is no cohort of that name here, or it is not yours."""

    code, title = "cohort-not-found", "Cohort not found"


class RoundNotFound(NotFound):
    """The cohort has had no such round."""

    code, title = "round-not-found", "Round not found"


class RevisionNotFound(NotFound):
    """The adapter has no such version, tag or revision."""

    code, title = "revision-not-found", "Revision not found"


class FileNotInAdapter(NotFound):
    """The version has no file of that name."""

    code, title = "file-not-in-adapter", "File not in adapter"


class Conflict(MobizoError):
    """The thing is not in a state that allows this; read it again and decide anew."""

    status, code, title = 409, "conflict", "Conflict"


class BudgetExceeded(Conflict):
    """This would spend more privacy than the budget has left; ask for less epsilon, or for a larger budget."""

    code, title = "privacy-budget-exceeded", "Privacy budget exceeded"


class NotReplayable(Conflict):
    """This version's steps cannot be made again: it came without a trajectory, or with one that was not verified."""

    code, title = "not-replayable", "Not replayable"


class VersionHeld(Conflict):
    """The adapter version waits for a person's approval; approve it first."""

    code, title = "version-held", "Version held"


class StartDeleted(Conflict):
    """The adapter version that the job goes on from was deleted; submit a job with another start."""

    code, title = "start-deleted", "Start deleted"


class MaskingOut(Conflict):
    """The masked round goes on without this device; its update does not count."""

    code, title = "masking-out", "Out of a masked round"


class Replayed(Conflict):
    """A request with this nonce came before; sign each try anew."""

    code, title = "replayed", "Replayed request"


class Gone(MobizoError):
    """The lease has ended and the job may be another device's by now; ask for a new lease."""

    status, code, title = 410, "lease-ended", "Lease ended"


class RoundClosed(Gone):
    """The round has ended; what the device trained came too late to count."""

    code, title = "round-closed", "Round closed"


class TooLarge(MobizoError):
    """The body is over this route's limit."""

    status, code, title = 413, "too-large", "Body too large"


class TooManyRequests(MobizoError):
    """More requests came than are taken; wait as long as Retry-After says."""

    status, code, title = 429, "too-many-requests", "Too many requests"


class Untrusted(MobizoError):
    """A signature or hash does not match; the file was changed on the way or comes from another server."""

    status, code, title = 422, "untrusted", "Untrusted content"


class AMismatch(Untrusted):
    """The frozen A is not the one that this adapter was trained with; nothing was made of it."""

    code, title = "a-mismatch", "Another frozen A"


class BaseMismatch(Untrusted):
    """The base model is not the one that this adapter was trained on; give the base that its manifest names."""

    code, title = "base-mismatch", "Another base model"


class Unavailable(MobizoError):
    """The server cannot serve this right now; try again later."""

    status, code, title = 503, "unavailable", "Unavailable"


class CompileFailed(MobizoError):
    """The compiler stopped; the server's log has its output."""

    status, code, title = 500, "compile-failed", "Compilation failed"


class ConversionFailed(MobizoError):
    """The conversion stopped; the server's log has its output."""

    status, code, title = 500, "conversion-failed", "Conversion failed"


class ConversionTooLarge(ConversionFailed):
    """Converting this takes more memory than any worker's machine may give; raise MOBIZO_COMPILE_BUDGET_BYTES."""

    code, title = "conversion-too-large", "Conversion too large"


class CompileTooLarge(CompileFailed):
    """Compiling this takes more memory than any machine with workers may give; raise MOBIZO_COMPILE_BUDGET_BYTES."""

    status, code, title = 500, "compile-too-large", "Compilation too large"


def _tree(root: type[MobizoError]) -> dict[str, type[MobizoError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


def from_problem(document: dict[str, Any]) -> MobizoError:
    """The error that a problem document describes, so that a client raises what the server raised."""
    known = _tree(MobizoError)
    code = document.get("code", MobizoError.code)
    detail = str(document.get("detail") or document.get("title") or "the server gave no reason")
    error = known.get(code, MobizoError)(detail)
    error.extra = {name: value for name, value in document.items() if name not in _STANDARD}
    return error
