"""The route of calibrations, which are the same for every tenant because they contain only public data."""

from __future__ import annotations

from typing import Annotated

from server.catalog.calibrations.service import CalibrationRepository
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.web.pages import Paging
from server.web.routes import Routes
from server.web.state import Reading
from shared.access import Scope
from shared.catalog import CalibrationView
from shared.protocol import Page

router = Routes(prefix="/v1/calibrations", tags=["calibrations"])


@router.get("")
def list_calibrations(
    principal: Annotated[Principal, needs(Scope.JOBS_READ)], session: Reading, paging: Paging
) -> Page[CalibrationView]:
    """Lists calibrations, newest first. `recipe.calibration` of a job is the sha256 of one."""
    repository = CalibrationRepository(session)
    page_rows = repository.page(paging)
    return paging.page(repository.views(page_rows.rows), page_rows.before)
