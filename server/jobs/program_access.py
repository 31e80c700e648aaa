"""All SQL of the programs that tenants and devices may read because of their jobs."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.jobs.leases.models import JobLease
from server.jobs.models import Job
from server.programs.models import Program, ProgramBlob


def program_of_tenant(session: Session, tenant: str, recipe_id: str) -> Program | None:
    """Returns the program of a recipe that one of the tenant's jobs uses."""
    used = select(Job.number).where(Job.tenant == tenant, Job.recipe_id == recipe_id).exists()
    return session.scalar(select(Program).where(Program.recipe_id == recipe_id, used))


def file_of_tenant(session: Session, tenant: str, sha256: str) -> ProgramBlob | None:
    """Returns a file of a program that one of the tenant's jobs uses."""
    statement = (
        select(ProgramBlob)
        .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
        .where(ProgramBlob.sha256 == sha256, Job.tenant == tenant)
    )
    return session.scalar(statement.limit(1))


def file_of_device(session: Session, device_id: str, sha256: str) -> ProgramBlob | None:
    """Returns a file of a program whose job is or was leased to the device."""
    statement = (
        select(ProgramBlob)
        .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
        .join(JobLease, JobLease.job_number == Job.number)
        .where(ProgramBlob.sha256 == sha256, JobLease.device_id == device_id)
    )
    return session.scalar(statement.limit(1))
