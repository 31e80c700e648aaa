"""The route of calibrations. They are the same for every tenant: made from data that is nobody's."""

from __future__ import annotations

from typing import Annotated

from server.auth.guard import needs
from server.auth.models import Scope
from server.auth.service import Principal
from server.calibrations.repository import CalibrationRepository
from server.http.pages import Paging
from server.http.place import Reading
from server.http.routes import Routes
from shared.protocol import CalibrationView, Page

router = Routes(prefix="/v1/calibrations", tags=["calibrations"])


@router.get("")
def calibrations(
    principal: Annotated[Principal, needs(Scope.JOBS_READ)], session: Reading, paging: Paging
) -> Page[CalibrationView]:
    """What a recipe may take A from, newest first: `recipe.calibration` of a job is one's sha256."""
    repository = CalibrationRepository(session)
    found = repository.page(paging)
    return paging.page(repository.views(found.rows), found.before)
