"""Routes of what was spent on users' data, and of their budgets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from fastapi.concurrency import run_in_threadpool

from server.federation.privacy.service import PrivacyService
from server.identity.access_rules import needs
from server.identity.devices.service import DeviceService
from server.identity.tokens import Principal
from server.web.routes import Routes
from server.web.state import Reading, State
from shared.access import Scope
from shared.job import NAME
from shared.privacy import DatasetPrivacy, PrivacyBudget, UserPrivacy

router = Routes(prefix="/v1", tags=["privacy"])
Reader = Annotated[Principal, needs(Scope.JOBS_READ)]
Writer = Annotated[Principal, needs(Scope.PRIVACY_WRITE)]
User = Annotated[str, Path(pattern=NAME)]


@router.get("/users/{user}/privacy")
def spent(principal: Reader, user: User, session: Reading) -> UserPrivacy:
    """The privacy spent on a user's data by all jobs, reserved runs included; zero for a user without jobs."""
    return PrivacyService(session).of_user(principal.tenant, user)


@router.get("/devices/{device_id}/privacy")
def spent_on_device(principal: Reader, device_id: str, session: Reading) -> list[DatasetPrivacy]:
    """The privacy that private runs have spent on each data set of a device, for all users together."""
    device = DeviceService(session).get(principal.tenant, device_id)
    return PrivacyService(session).of_device(principal.tenant, device.id)


@router.put("/users/{user}/privacy")
async def limit(principal: Writer, user: User, budget: PrivacyBudget, state: State) -> UserPrivacy:
    """Sets a user's budget: from now on a job that would exceed it is refused, and so is any without `privacy`."""

    def write() -> None:
        with state.database.writing() as session:
            PrivacyService(session).set_limit(principal.tenant, user, budget.epsilon, budget.delta)

    def read() -> UserPrivacy:
        with state.database.reading() as session:
            return PrivacyService(session).of_user(principal.tenant, user)

    await state.write_queue.run(write)
    return await run_in_threadpool(read)  # after the transaction, because the accounting may take seconds
