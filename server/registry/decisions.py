"""Decisions of people about versions: approve, promote, delete, restore.

Each decision is one transaction with the adapter's row locked, and adds an entry to the audit trail. A version becomes
`main` when it is approved, unless a version with a higher number was approved before, or when a person promotes it,
which lasts until the next version is approved. Repeating a decision changes nothing.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.tokens import Principal
from server.registry.models import Actor, AuditEntry, AuditTrail, StoredVersion
from server.registry.repository import AdapterRepository, find_adapter, find_version
from shared.errors import Conflict
from shared.registry import AdapterAction, ApprovalRule, VersionState


class DecisionService:
    """One person's decisions about one adapter, in one writing transaction."""

    def __init__(self, session: Session, principal: Principal, name: str, *, deleted: bool = False) -> None:
        """deleted: the adapter may be a deleted one. Raises AdapterNotFound."""
        self._session, self._actor = session, Actor.of(principal)
        self._adapters, self._trail = AdapterRepository(session), AuditTrail(session)
        self.adapter = find_adapter(session, principal.tenant, name, lock=True, deleted=deleted)

    def approve(self, revision: str, reason: str) -> StoredVersion:
        """Approves a held version. Raises RevisionNotFound."""
        version = self._find(revision)
        if version.kept_state is VersionState.APPROVED:
            return version
        highest = self._adapters.latest_approved(self.adapter) or 0
        version.kept_state, version.message = VersionState.APPROVED, ""
        main = version.version if version.version > highest else self.adapter.main_version
        self._note(AdapterAction.APPROVED, version, main=main, reason=reason)
        return version

    def promote(self, revision: str, reason: str) -> StoredVersion:
        """Makes an approved version `main`. Raises RevisionNotFound, Conflict for a version that is not approved."""
        version = self._find(revision)
        if version.kept_state is not VersionState.APPROVED:
            raise Conflict(f"version {version.version} is {version.kept_state}; approve it before it can be `main`")
        if version.version != self.adapter.main_version:
            self._note(AdapterAction.PROMOTED, version, main=version.version, reason=reason)
        return version

    def delete_version(self, revision: str, reason: str) -> StoredVersion:
        """Deletes a version; it can be restored until it is purged. Raises RevisionNotFound."""
        version = self._find(revision, deleted=True)
        if version.deleted_at is None:
            version.deleted_at = utc_now()
            main = self.adapter.main_version
            if main == version.version:
                main = self._latest_approved()
            self._note(AdapterAction.DELETED, version, main=main, reason=reason)
        return version

    def undelete_version(self, revision: str, reason: str) -> StoredVersion:
        """Restores a deleted version. Raises RevisionNotFound."""
        version = self._find(revision, deleted=True)
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

    def rule(self, rule: ApprovalRule | None) -> None:
        """Sets the adapter's own rule; None removes it. The states of existing versions do not change."""
        if self.adapter.rule != rule:
            self.adapter.rule = rule
            reason = "as the tenant's" if rule is None else rule.model_dump_json()
            self._note(AdapterAction.RULE_CHANGED, None, main=self.adapter.main_version, reason=reason)

    def _find(self, revision: str, *, deleted: bool = False) -> StoredVersion:
        return find_version(self._session, self.adapter, revision, deleted=deleted)

    def _latest_approved(self) -> int | None:
        self._session.flush()
        return self._adapters.latest_approved(self.adapter)

    def _note(self, action: AdapterAction, version: StoredVersion | None, *, main: int | None, reason: str) -> None:
        """Sets `main` and adds an entry to the audit trail."""
        before, self.adapter.main_version = self.adapter.main_version, main
        number = None if version is None else version.version
        moved = (before, main) if before != main else (None, None)
        self._trail.add(self.adapter, self._actor, AuditEntry(action, number, moved, reason))
        self._session.flush()
