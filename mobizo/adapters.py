"""The client's adapters: listed, compared, decided on. Knows their routes; HTTP is the transport's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from mobizo.connection import Connection
from shared.errors import AdapterNotFound, RevisionNotFound
from shared.job import NAME
from shared.protocol import AdapterVersion, AdapterView, AssignmentView
from shared.registry import AdapterEvent, ApprovalRule, Comparison, RuleView, VersionState

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Adapters(Connection):
    """The registry of one tenant.

    A revision is `main`, a version's number (7, "7" or "v7"), a tag, or the beginning of a version's `revision`, at
    least 7 of its 40 digits. `reason` goes to the audit trail. Methods raise AdapterNotFound and RevisionNotFound.
    """

    def adapters(self, *, deleted: bool = False) -> Iterator[AdapterView]:
        """Every adapter of the tenant, newest first; those that were deleted and can be taken back, if asked for."""
        for item in self._pages("/v1/adapters", deleted=deleted or None):
            yield AdapterView.model_validate(item)

    def adapter(self, name: str) -> AdapterView:
        """One adapter with its latest version, its `main` and its tags."""
        return AdapterView.model_validate(self._get(_of(name)))

    def versions(self, name: str, state: VersionState | None = None) -> Iterator[AdapterVersion]:
        """An adapter's versions, newest first; of one state, or all, deleted ones too."""
        for item in self._pages(f"{_of(name)}/versions", state=state):
            yield AdapterVersion.model_validate(item)

    def version(self, name: str, revision: str | int = "main") -> AdapterVersion:
        """The version that a revision stands for."""
        return AdapterVersion.model_validate(self._get(f"{_of(name)}/revisions/{_word(name, revision)}"))

    def compare(self, name: str, left: str | int, right: str | int = "main", *, other: str | None = None) -> Comparison:
        """What two versions differ in. other: the adapter on the right; None: the same."""
        return Comparison.model_validate(self._get(f"{_of(name)}/compare", left=left, right=right, other=other))

    def events(self, name: str) -> Iterator[AdapterEvent]:
        """Who did what to an adapter, when and why, newest first; also once it is deleted."""
        for item in self._pages(f"{_of(name)}/events"):
            yield AdapterEvent.model_validate(item)

    def promote(self, name: str, revision: str | int, reason: str = "") -> AdapterView:
        """Makes an approved version `main`. Raises Conflict for one that is not approved."""
        return self._adapter("POST", f"{_of(name)}/promote", {"revision": str(revision), "reason": reason})

    def rollback(self, name: str, revision: str | int | None = None, reason: str = "") -> AdapterView:
        """Makes an earlier version `main` again; None: what it was before. Raises Conflict if there is none."""
        body = {"revision": None if revision is None else str(revision), "reason": reason}
        return AdapterView.model_validate(self._make(f"{_of(name)}/rollback", body))

    def tag(self, name: str, tag: str, revision: str | int = "main", reason: str = "") -> AdapterView:
        """Puts a tag on a version, or moves it there."""
        path = f"{_of(name)}/tags/{_word(name, tag)}"
        return self._adapter("PUT", path, {"revision": str(revision), "reason": reason})

    def untag(self, name: str, tag: str, reason: str = "") -> AdapterView:
        """Takes a tag away."""
        return self._adapter("DELETE", f"{_of(name)}/tags/{_word(name, tag)}", reason=reason)

    def approve(self, name: str, revision: str | int, reason: str = "") -> AdapterVersion:
        """Approves a held or deprecated version; it becomes `main` if no later one was approved."""
        return self._decide(name, revision, "approve", {"reason": reason})

    def reject(self, name: str, revision: str | int, reason: str = "") -> AdapterVersion:
        """Deletes a held version. Raises Conflict for one that is not held."""
        return self._decide(name, revision, "reject", {"reason": reason})

    def deprecate(self, name: str, revision: str | int, message: str, reason: str = "") -> AdapterVersion:
        """Warns of a version, which can still be had. message: for those who use it."""
        return self._decide(name, revision, "deprecate", {"message": message, "reason": reason})

    def delete(self, name: str, revision: str | int | None = None, reason: str = "") -> AdapterView | AdapterVersion:
        """Deletes a version, or with None the adapter; it can be taken back until `removed_after`."""
        if revision is None:
            return self._adapter("DELETE", _of(name), reason=reason)
        path = f"{_of(name)}/versions/{self.version(name, revision).version}"
        return AdapterVersion.model_validate(self._ask("DELETE", path, reason=reason))

    def undelete(self, name: str, version: int | None = None, reason: str = "") -> AdapterView | AdapterVersion:
        """Takes a deleted version back, by its number, or with None the adapter."""
        if version is None:
            return self._adapter("POST", f"{_of(name)}/undelete", {"reason": reason})
        path = f"{_of(name)}/versions/{version}/undelete"
        return AdapterVersion.model_validate(self._ask("POST", path, {"reason": reason}))

    def assignments(self, name: str) -> Iterator[AssignmentView]:
        """The devices that an adapter was assigned to, newest first; those that trained it need no assignment."""
        for item in self._pages(f"{_of(name)}/devices"):
            yield AssignmentView.model_validate(item)

    def assign(self, name: str, device_id: str) -> AssignmentView:
        """Lets a device have an adapter's published versions."""
        path = f"{_of(name)}/devices/{quote(device_id, safe='')}"
        return AssignmentView.model_validate(self._ask("PUT", path))

    def withdraw(self, name: str, device_id: str) -> None:
        """Takes that back; what the device has fetched stays with it."""
        self._transport.request("DELETE", f"{_of(name)}/devices/{quote(device_id, safe='')}")

    def rule(self, name: str | None = None) -> RuleView:
        """By which new versions are approved: an adapter's, or with None the tenant's."""
        return RuleView.model_validate(self._get(_rule(name)))

    def set_rule(self, rule: ApprovalRule | None, name: str | None = None) -> RuleView:
        """Sets the rule of an adapter, or with None as `name` the tenant's; None as `rule`: as the one above it."""
        body = {"rule": None if rule is None else rule.model_dump(mode="json")}
        return RuleView.model_validate(self._ask("PUT", _rule(name), body))

    def _decide(self, name: str, revision: str | int, what: str, body: dict[str, Any]) -> AdapterVersion:
        path = f"{_of(name)}/versions/{self.version(name, revision).version}/{what}"
        return AdapterVersion.model_validate(self._ask("POST", path, body))

    def _adapter(self, method: str, path: str, body: Any = None, reason: str = "") -> AdapterView:
        return AdapterView.model_validate(self._ask(method, path, body, reason))

    def _ask(self, method: str, path: str, body: Any = None, reason: str = "") -> Any:
        """A decision, tried again where no answer came: said twice, it is made once."""
        params = {"reason": reason} if reason else None
        return self._transport.request(method, path, json=body, params=params).json()


def _of(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise AdapterNotFound(f"there is no adapter {name!r}")
    return f"/v1/adapters/{name}"


def _rule(name: str | None) -> str:
    return "/v1/approval-rule" if name is None else f"{_of(name)}/rule"


def _word(name: str, text: str | int) -> str:
    """A revision or a tag as part of an address."""
    if not _WORD.fullmatch(str(text)):
        raise RevisionNotFound(f"adapter {name!r} has no version {text!r}")
    return str(text)
