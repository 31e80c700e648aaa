"""All SQL about programs, their files and their workers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from server.bases.models import BaseModelEntry
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.jobs.models import Job
from server.leases.models import JobLease
from server.programs.models import Program, ProgramBlob, ProgramState, Worker
from shared.program import SignedManifest


class ProgramRepository:
    """Programs in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, program: Program) -> None:
        """Stores a new program."""
        self._session.add(program)
        self._session.flush()

    def get(self, recipe_id: str) -> Program | None:
        """The program of a recipe."""
        return self._session.scalar(select(Program).where(Program.recipe_id == recipe_id))

    def named(self, recipe_id: str) -> Program:
        """The program of a recipe, known to exist."""
        return self._session.scalars(select(Program).where(Program.recipe_id == recipe_id)).one()

    def named_locked(self, recipe_id: str) -> Program:
        """The program of a recipe, known to exist; nobody else changes it until the transaction ends."""
        return self._session.scalars(locked(select(Program).where(Program.recipe_id == recipe_id))).one()

    def page(self, request: PageRequest) -> PageRows[Program]:
        """Some of all programs, newest first."""
        return page_of(self._session, select(Program), Program, request)

    def base(self, program: Program) -> BaseModelEntry:
        """The program's base model."""
        return self._session.get_one(BaseModelEntry, program.base_number)

    def signed(self, recipe_id: str) -> SignedManifest | None:
        """The signed manifest of a recipe's program, once it is compiled."""
        return self._session.scalar(select(Program.signed).where(Program.recipe_id == recipe_id))

    def compiled(self) -> Sequence[Program]:
        """Every program that has a signed manifest."""
        return self._session.scalars(select(Program).where(Program.signed.is_not(None)).order_by(Program.number)).all()

    def source(self, program: Program) -> str:
        """Where the program's base model lies."""
        return self.base(program).source

    def of_tenant(self, tenant: str, recipe_id: str) -> Program | None:
        """The program of a recipe that one of the tenant's jobs asked for."""
        wanted = select(Job.number).where(Job.tenant == tenant, Job.recipe_id == recipe_id).exists()
        return self._session.scalar(select(Program).where(Program.recipe_id == recipe_id, wanted))

    def holders(self, now: datetime) -> Sequence[str]:
        """Ids of the workers that hold a program now."""
        statement = select(Program.worker_id).where(
            Program.state == ProgramState.COMPILING, Program.lease_expires_at >= now, Program.worker_id.is_not(None)
        )
        return [worker_id for worker_id in self._session.scalars(statement) if worker_id is not None]

    def held(self, recipe_id: str, worker_id: str) -> Program | None:
        """The program, if it is still that worker's to compile; locked."""
        statement = select(Program).where(
            Program.recipe_id == recipe_id, Program.worker_id == worker_id, Program.state == ProgramState.COMPILING
        )
        return self._session.scalar(locked(statement))

    def set_files(self, recipe_id: str, version: int, files: Sequence[ProgramBlob]) -> None:
        """Stores that a version of a program has these files, and forgets those of all but the version before."""
        self._session.execute(
            delete(ProgramBlob).where(ProgramBlob.recipe_id == recipe_id, ProgramBlob.version != version - 1)
        )
        self._session.add_all(files)

    def file_of_tenant(self, tenant: str, sha256: str) -> ProgramBlob | None:
        """A file of a program that one of the tenant's jobs asked for."""
        statement = (
            select(ProgramBlob)
            .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
            .where(ProgramBlob.sha256 == sha256, Job.tenant == tenant)
        )
        return self._session.scalar(statement.limit(1))

    def file_of_device(self, device_id: str, sha256: str) -> ProgramBlob | None:
        """A file of a program whose job is or was leased to the device."""
        statement = (
            select(ProgramBlob)
            .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
            .join(JobLease, JobLease.job_number == Job.number)
            .where(ProgramBlob.sha256 == sha256, JobLease.device_id == device_id)
        )
        return self._session.scalar(statement.limit(1))


class WorkerRepository:
    """Workers in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, worker: Worker) -> None:
        """Stores a worker that has just started."""
        self._session.add(worker)
        self._session.flush()

    def get(self, worker_id: str) -> Worker:
        """A worker that is known to exist."""
        return self._session.get_one(Worker, worker_id)

    def peaks(self, since: datetime) -> tuple[int, int]:
        """Peak memory of any worker, and of any of their compilers, heard from after `since`; bytes."""
        statement = select(func.max(Worker.peak_rss_bytes), func.max(Worker.compiler_peak_rss_bytes))
        worker, compiler = self._session.execute(statement.where(Worker.seen_at >= since)).one()
        return worker or 0, compiler or 0
