"""Connects the packages of the server: `wire()` is called once by the application, the worker and the command line.

A package imports only packages below it (tests/test_architecture.py has the order). What it needs from above it
declares as a `Port` (server/ports.py): a typed slot that a package above implements. `wire` connects every port.
Handlers run in the transaction of the caller. A port that was not connected raises RuntimeError when it is used.
Parts of the web application need no port: `state.get(make)` makes each of them once.
"""

from __future__ import annotations

from server.catalog.calibrations.service import USERS
from server.federation.member_recipes import round_task
from server.federation.privacy.service import PrivacyService, prepare_privacy
from server.federation.repository import CohortAdapters, adapters_of_member, cohort_with_calibration
from server.identity.audit import PUBLISH
from server.identity.devices.service import REVOKED, UNBOUND
from server.identity.signing_keys.service import RESEAL, RESIGNERS
from server.jobs.leases.repository import file_of_device
from server.jobs.leases.service import take_back_revoked, take_back_unbound
from server.jobs.repository import file_of_tenant, is_awaited, job_with_calibration, program_of_tenant
from server.jobs.service import (
    PREPARE_PRIVACY,
    ROUND_TASK,
    SUBSCRIBERS,
    WARM_STARTS,
    follow_program,
    show_compile_progress,
)
from server.programs.service import ACCESS, MOVED, PROGRESSED, ProgramAccess, sign_programs
from server.registry.device_adapters import SHARED, file_of_adapter
from server.registry.repository import version_with_calibration
from server.registry.service import RegistrySubscriber
from server.registry.warm_start import StartService
from server.schema import FILE_COLUMNS
from server.storage.store import REFERENCES
from server.webhooks.repository import JobPublisher, publish
from server.webhooks.service import reseal


def wire() -> None:
    """Connects every port. Calling it again changes nothing."""
    REFERENCES.connect(FILE_COLUMNS)
    PUBLISH.connect(publish)
    RESEAL.connect(reseal)
    RESIGNERS.connect((sign_programs,))
    REVOKED.connect(take_back_revoked)
    UNBOUND.connect(take_back_unbound)
    USERS.connect((version_with_calibration, cohort_with_calibration, job_with_calibration))
    ACCESS.connect(ProgramAccess(program_of_tenant, file_of_tenant, (file_of_device, file_of_adapter), is_awaited))
    MOVED.connect(follow_program)
    PROGRESSED.connect(show_compile_progress)
    WARM_STARTS.connect(StartService)
    # The first that objects decides which error a submitted job gets.
    SUBSCRIBERS.connect((CohortAdapters, PrivacyService, RegistrySubscriber, JobPublisher))
    PREPARE_PRIVACY.connect(prepare_privacy)
    ROUND_TASK.connect(round_task)
    SHARED.connect(adapters_of_member)
