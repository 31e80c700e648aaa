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

import re
from typing import Any, ClassVar

PROBLEM_TYPE = "urn:mobizo:problem:"
_STANDARD = frozenset({"type", "title", "status", "detail", "code", "instance"})


class MobizoError(Exception):
    """Something went wrong inside mobizo; the server's log has the details."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "Internal error"

    def __init_subclass__(cls, status: int | None = None, code: str | None = None, title: str | None = None) -> None:
        """The default code is the name in lower case with hyphens; the default title is the code in words.

        Codes of the server are stable: docs/problems.md lists them.
        """
        if status is not None:
            cls.status = status
        cls.code = code or re.sub(r"\B(?=[A-Z])", "-", cls.__name__).lower()
        cls.title = title or cls.code.replace("-", " ").capitalize()

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


class BadRequest(MobizoError, status=400):
    """The request is malformed; compare it with the API description at /docs."""


class InvalidRequest(BadRequest, status=422):
    """The request does not match the API description at /docs; correct the named fields."""


class InvalidRecipe(BadRequest, status=422):
    """The recipe cannot be compiled; correct the named field."""


class UnknownBase(BadRequest, status=404, title="Unknown base model"):
    """No base model with this name is registered; `mobizo-server base list` shows the registered ones."""


class UnreadableCheckpoint(BadRequest, status=422):
    """The model files are damaged or incomplete; download them again."""


class UnsupportedModel(BadRequest, status=422):
    """The compiler cannot map this architecture exactly; choose a supported one."""


class ToolchainMissing(BadRequest, status=422):
    """This server does not have the tools that the recipe's backend needs; install them or choose another backend."""


class InvalidTask(BadRequest, status=422):
    """The task's template or answers cannot be used; correct the named part."""


class InvalidDataset(BadRequest, status=422):
    """A data file contains an invalid line; correct the named line."""


class InvalidUpload(BadRequest, status=422):
    """The uploaded adapter does not fit its program; nothing was stored."""


class InvalidTrajectory(InvalidUpload):
    """The trajectory is damaged or belongs to another run; nothing was stored."""


class TrajectoryMismatch(InvalidUpload):
    """Replaying the trajectory yields a different adapter than the uploaded one; send the adapter without it."""


class CohortMismatch(InvalidUpload):
    """The update was not trained with the cohort's base and frozen A; nothing was stored."""


class InvalidUpdate(InvalidUpload):
    """The round does not accept this update; nothing was stored."""


class StartMismatch(BadRequest, status=422):
    """The job cannot continue from this adapter version; use the recipe of that version."""


class UnsupportedFormat(BadRequest, status=422):
    """This adapter cannot be converted exactly to the requested format; choose another format."""


class Unauthorized(MobizoError, status=401):
    """A valid token is required: send `Authorization: Bearer TOKEN`."""


class BadSignature(Unauthorized):
    """The signature does not match the request and this device's key; if the key was lost, enroll the device again."""


class ClockSkew(Unauthorized):
    """The signature's time differs too much from the server's clock; sign again with the server time given here."""


class DigestMismatch(BadRequest):
    """The body does not match its Content-Digest and was discarded; send it again."""


class Forbidden(MobizoError, status=403):
    """This token does not have the required permission; ask the operator for a token that has it."""


class TenantSuspended(Forbidden):
    """The tenant is suspended, so its tokens are rejected; ask the operator of the server."""


class NotAMember(Forbidden):
    """The user has left the cohort; the update is discarded."""


class NotFound(MobizoError, status=404):
    """The resource does not exist, or it belongs to another tenant."""


class AdapterNotFound(NotFound):
    """The adapter does not exist, or it belongs to another tenant."""


class CohortNotFound(NotFound):
    """The cohort does not exist, or it belongs to another tenant."""


class RoundNotFound(NotFound):
    """The cohort has no round with this number."""


class RevisionNotFound(NotFound):
    """The adapter does not have this version or revision."""


class FileNotInAdapter(NotFound):
    """The version has no file with this name."""


class Conflict(MobizoError, status=409):
    """The current state of the resource does not allow this; fetch the resource and try again."""


class BudgetExceeded(Conflict, code="privacy-budget-exceeded"):
    """This would exceed the privacy budget; request a smaller epsilon, or raise the budget."""


class DeviceNotBound(Conflict, title="Device not bound to the user"):
    """The device does not train for this user; an operator binds the user to it with `mobizo device bind`."""


class QuotaExceeded(Conflict):
    """The tenant has as much as its quota allows; remove some, or ask the operator for a larger quota."""


class NotReplayable(Conflict):
    """The steps of this version cannot be reconstructed: it has no trajectory, or the trajectory was not verified."""


class VersionHeld(Conflict):
    """The adapter version waits for approval; approve it first."""


class StartDeleted(Conflict):
    """The adapter version that the job starts from was deleted; submit a job with another start."""


class LeftOutOfRound(Conflict, code="masking-out", title="Out of a masked round"):
    """The masked round continues without this device; the update is discarded."""


class ReplayedRequest(Conflict, code="replayed", title="Replayed request"):
    """The nonce of this request was used before; sign every attempt with a new nonce."""


class Gone(MobizoError, status=410, code="lease-ended"):
    """The lease has ended and the job may be leased to another device; request a new lease."""


class RoundClosed(Gone):
    """The round has ended; the update came too late."""


class TooSlow(MobizoError, status=408, title="Request timeout"):
    """The body took too long to arrive; send it again, over a better connection."""


class TooLarge(MobizoError, status=413, title="Body too large"):
    """The body exceeds the size limit of this route; send a smaller body."""


class TooManyRequests(MobizoError, status=429):
    """The rate limit is exceeded; wait for the time given in Retry-After."""


class Untrusted(MobizoError, status=422, title="Untrusted content"):
    """A signature or hash does not match: the file was modified, or it comes from another server."""


class AMismatch(Untrusted, title="Frozen A mismatch"):
    """The frozen A differs from the one that this adapter was trained with; nothing was converted."""


class BaseMismatch(Untrusted, title="Base model mismatch"):
    """The base model differs from the one that this adapter was trained on; use the base named in its manifest."""


class Unavailable(MobizoError, status=503):
    """The server cannot serve this right now; try again later."""


class CompileFailed(MobizoError, title="Compilation failed"):
    """The compiler stopped; the server's log has its output."""


class CompileTooLarge(CompileFailed, title="Compilation too large"):
    """The compilation needs more memory than any worker machine may use; raise MOBIZO_COMPILE_BUDGET_BYTES."""


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
