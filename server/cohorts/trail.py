"""What happened to a cohort, as lines in the audit trail of its adapter. Knows no HTTP."""

from __future__ import annotations

import structlog
from sqlalchemy.orm import Session

from server.adapters.audit import Actor, AuditTrail, Line
from server.adapters.repository import AdapterRepository
from server.cohorts.models import Cohort
from shared.registry import AdapterAction

_log = structlog.get_logger()


def note(session: Session, cohort: Cohort, actor: Actor, action: AdapterAction, reason: str) -> None:
    """Adds a line. A cohort whose adapter was removed for good has no trail; the log tells of it still."""
    adapter = AdapterRepository(session).get(cohort.tenant, cohort.name)
    if adapter is not None:
        AuditTrail(session).add(adapter, actor, Line(action, reason=reason))
    _log.info(f"cohort-{action}", tenant=cohort.tenant, cohort=cohort.name, reason=reason)
