"""Routes of what was spent on users' data, and of their budgets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.http.place import Reading, Writing
from server.http.routes import Routes
from server.privacy.service import PrivacyService
from shared.job import NAME
from shared.privacy import PrivacyBudget, UserPrivacy

router = Routes(prefix="/v1", tags=["privacy"])
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.PRIVACY_WRITE)]
User = Annotated[str, Path(pattern=NAME)]


@router.get("/users/{user}/privacy")
def spent(principal: Reader, user: User, session: Reading) -> UserPrivacy:
    """What all jobs together have spent on a user's data, reserved runs included; nothing, where he had no job."""
    return PrivacyService(session).of_user(principal.tenant, user)


@router.put("/users/{user}/privacy")
def limit(principal: Writer, user: User, budget: PrivacyBudget, session: Writing) -> UserPrivacy:
    """Sets a user's budget: from now on a job that would exceed it is refused, and so is any without `privacy`."""
    return PrivacyService(session).set_limit(principal.tenant, user, budget.epsilon, budget.delta)
