"""Decisions of people about versions: approve, reject, promote, roll back, tag, deprecate, delete, restore.

Each decision is one transaction with the adapter's row locked, and adds an entry to the audit trail. A version becomes
`main` when it is approved, unless a version with a higher number was approved before, or when a person promotes it. A
rollback lasts until the next version is approved. Repeating a decision changes nothing.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.tokens import Principal
from server.registry.models import Actor, AdapterTag, AuditEntry, AuditTrail, StoredVersion
from server.registry.repository import AdapterRepository, find_adapter, find_version
from shared.errors import Conflict, RevisionNotFound
from shared.registry import AdapterAction, ApprovalRule, VersionState

MAX_TAGS = 100


class DecisionService:
    """One person's decisions about one adapter, in one writing transaction."""

    def __init__(self, session: Session, actor: Actor, tenant: str, name: str, *, deleted: bool = False) -> None:
        """deleted: the adapter may be a deleted one. Raises AdapterNotFound."""
        self._session, self._actor = session, actor
        self._adapters, self._trail = AdapterRepository(session), AuditTrail(session)
        self.adapter = find_adapter(session, tenant, name, lock=True, deleted=deleted)

    @classmethod
    def of(cls, session: Session, principal: Principal, name: str, *, deleted: bool = False) -> DecisionService:
        """Returns the decisions of a caller about one adapter. Raises AdapterNotFound."""
        return cls(session, Actor.of(principal), principal.tenant, name, deleted=deleted)

    def approve(self, revision: str, reason: str) -> StoredVersion:
        """Approves a held or deprecated version. Raises RevisionNotFound."""
        version = self.find(revision)
        if version.kept_state is VersionState.APPROVED:
            return version
        highest = self._adapters.latest_approved(self.adapter) or 0
        version.kept_state, version.message = VersionState.APPROVED, ""
        main = version.version if version.version > highest else self.adapter.main_version
        self._note(AdapterAction.APPROVED, version, main=main, reason=reason)
        return version

    def reject(self, revision: str, reason: str) -> StoredVersion:
        """Deletes a held version. Raises RevisionNotFound, Conflict for a version that is not held."""
        version = self._any(revision)
        if version.deleted_at is not None:
            return version
        if version.kept_state is not VersionState.HELD:
            raise Conflict(f"version {version.version} is {version.kept_state}, not held; deprecate or delete it")
        return self._delete(version, AdapterAction.REJECTED, reason)

    def promote(self, revision: str, reason: str) -> StoredVersion:
        """Makes an approved version `main`. Raises RevisionNotFound, Conflict for a version that is not approved."""
        version = self.find(revision)
        self._check_approved(version)
        if version.version != self.adapter.main_version:
            self._note(AdapterAction.PROMOTED, version, main=version.version, reason=reason)
        return version

    def roll_back(self, revision: str | None, reason: str) -> StoredVersion:
        """Makes an earlier version `main` again; None: the previous `main`.

        Raises RevisionNotFound, Conflict if there is no previous `main` or the version is no longer approved.
        """
        if revision is None:
            before = self._trail.main_before(self.adapter)
            if before is None:
                raise Conflict(f"`main` of adapter {self.adapter.name!r} was no other version before; say which one")
            revision = f"v{before}"
        version = self.find(revision)
        self._check_approved(version)
        if version.version != self.adapter.main_version:
            self._note(AdapterAction.ROLLED_BACK, version, main=version.version, reason=reason)
        return version

    def deprecate(self, revision: str, message: str, reason: str) -> StoredVersion:
        """Deprecates a version. `main` moves to the latest approved version, if there is another.

        Raises RevisionNotFound, Conflict for a held version.
        """
        version = self.find(revision)
        if version.kept_state is VersionState.HELD:
            raise Conflict(f"version {version.version} is held; approve or reject it")
        if (version.kept_state, version.message) == (VersionState.DEPRECATED, message):
            return version
        version.kept_state, version.message = VersionState.DEPRECATED, message
        main = self.adapter.main_version
        if main == version.version:
            main = self._latest_approved() or main
        self._note(AdapterAction.DEPRECATED, version, main=main, reason=reason or message)
        return version

    def delete_version(self, revision: str, reason: str) -> StoredVersion:
        """Deletes a version; it can be restored until it is purged. Raises RevisionNotFound."""
        version = self._any(revision)
        return version if version.deleted_at is not None else self._delete(version, AdapterAction.DELETED, reason)

    def undelete_version(self, revision: str, reason: str) -> StoredVersion:
        """Restores a deleted version. Raises RevisionNotFound."""
        version = self._any(revision)
        if version.deleted_at is not None:
            version.deleted_at = None
            main = self.adapter.main_version or self._latest_approved()
            self._note(AdapterAction.UNDELETED, version, main=main, reason=reason)
        return version

    def delete(self, reason: str) -> None:
        """Deletes the adapter with its versions; it can be restored until it is purged."""
        if self.adapter.deleted_at is None:
            self.adapter.deleted_at = utc_now()
            self._note(AdapterAction.DELETED, None, main=self.adapter.main_version, reason=reason)

    def undelete(self, reason: str) -> None:
        """Restores the adapter."""
        if self.adapter.deleted_at is not None:
            self.adapter.deleted_at = None
            self._note(AdapterAction.UNDELETED, None, main=self.adapter.main_version, reason=reason)

    def tag(self, name: str, revision: str, reason: str) -> StoredVersion:
        """Tags a version, or moves the tag to it. Raises RevisionNotFound, Conflict at the limit of tags."""
        version, tag = self.find(revision), self._adapters.tag(self.adapter, name)
        if tag is None:
            if self._adapters.count_tags(self.adapter) >= MAX_TAGS:
                raise Conflict(f"adapter {self.adapter.name!r} has {MAX_TAGS} tags, the most; delete one first")
            tag = AdapterTag(adapter_number=self.adapter.number, name=name)
        elif tag.version_number == version.number:
            return version
        tag.version_number, tag.moved_at = version.number, utc_now()
        self._adapters.add(tag)
        self._note(AdapterAction.TAGGED, version, main=self.adapter.main_version, tag=name, reason=reason)
        return version

    def untag(self, name: str, reason: str) -> None:
        """Removes a tag. Raises RevisionNotFound if it does not exist."""
        tag = self._adapters.tag(self.adapter, name)
        if tag is None:
            raise RevisionNotFound(f"adapter {self.adapter.name!r} has no tag {name!r}")
        self._adapters.untag(tag)
        self._note(AdapterAction.UNTAGGED, None, main=self.adapter.main_version, tag=name, reason=reason)

    def rule(self, rule: ApprovalRule | None) -> None:
        """Sets the adapter's own rule; None removes it. The states of existing versions do not change."""
        if self.adapter.rule != rule:
            self.adapter.rule = rule
            reason = "as the tenant's" if rule is None else rule.model_dump_json()
            self._note(AdapterAction.RULE_CHANGED, None, main=self.adapter.main_version, reason=reason)

    def find(self, revision: str) -> StoredVersion:
        """Returns the version of a revision. Raises RevisionNotFound."""
        return find_version(self._session, self.adapter, revision)

    def _any(self, revision: str) -> StoredVersion:
        return find_version(self._session, self.adapter, revision, deleted=True)

    def _check_approved(self, version: StoredVersion) -> None:
        if version.kept_state is not VersionState.APPROVED:
            raise Conflict(f"version {version.version} is {version.kept_state}; approve it before it can be `main`")

    def _latest_approved(self) -> int | None:
        self._session.flush()
        return self._adapters.latest_approved(self.adapter)

    def _delete(self, version: StoredVersion, action: AdapterAction, reason: str) -> StoredVersion:
        version.deleted_at = utc_now()
        main = self.adapter.main_version
        if main == version.version:
            main = self._latest_approved()
        self._note(action, version, main=main, reason=reason)
        return version

    def _note(
        self,
        action: AdapterAction,
        version: StoredVersion | None,
        *,
        main: int | None,
        tag: str | None = None,
        reason: str = "",
    ) -> None:
        """Sets `main` and adds an entry to the audit trail."""
        before, self.adapter.main_version = self.adapter.main_version, main
        number = None if version is None else version.version
        moved = (before, main) if before != main else (None, None)
        self._trail.add(self.adapter, self._actor, AuditEntry(action, number, moved, tag, reason))
        self._session.flush()
