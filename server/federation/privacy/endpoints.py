"""Routes of what was spent on users' data, and of their budgets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request

from server.federation.privacy.repository import PrivacyRepository
from server.federation.privacy.service import PrivacyService
from server.identity.access_rules import needs
from server.identity.devices.service import DeviceService
from server.identity.tokens import Principal
from server.jobs.accounting import accounted
from server.web.routes import Routes
from server.web.state import State
from shared.access import Scope
from shared.job import NAME
from shared.privacy import DatasetPrivacy, PrivacyBudget, UserPrivacy

router = Routes(prefix="/v1", tags=["privacy"])
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.PRIVACY_WRITE)]
User = Annotated[str, Path(pattern=NAME)]


@router.get("/users/{user}/privacy")
async def get_user_privacy(principal: Reader, user: User, state: State, connection: Request) -> UserPrivacy:
    """The privacy spent on a user's data by all jobs, reserved runs included; zero for a user without jobs."""

    def read() -> UserPrivacy:
        with state.database.reading() as session:
            return PrivacyService(session).of_user(principal.tenant, user)

    return await accounted(connection, principal.tenant, read)


@router.get("/devices/{device_id}/privacy")
async def get_device_privacy(
    principal: Reader, device_id: str, state: State, connection: Request
) -> list[DatasetPrivacy]:
    """The privacy that private runs have spent on each data set of a device, for all users together."""

    def read() -> list[DatasetPrivacy]:
        with state.database.reading() as session:
            device = DeviceService(session).get(principal.tenant, device_id)
            return PrivacyService(session).of_device(principal.tenant, device.id)

    return await accounted(connection, principal.tenant, read)


@router.put("/users/{user}/privacy")
async def set_user_privacy(
    principal: Writer, user: User, budget: PrivacyBudget, state: State, connection: Request
) -> UserPrivacy:
    """Sets a user's budget: from now on a job that would exceed it is refused, and so is any without `privacy`."""
    await state.write_queue.transact(
        lambda session: PrivacyRepository(session).set_limit(principal.tenant, user, budget.epsilon, budget.delta)
    )
    return await get_user_privacy(principal, user, state, connection)
