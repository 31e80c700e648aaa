"""Making merged models: the handler of conversion tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import structlog
from sqlalchemy.orm import Session

from server.catalog.bases import BaseRepository
from server.catalog.calibrations.service import calibration_file
from server.database.columns import utc_now
from server.database.database import Database
from server.registry.exports.converter_process import RESULT, ConverterCrashed, ConverterProcess, Order
from server.registry.exports.models import CONVERT, ConversionFile, ConversionState
from server.registry.exports.repository import ConversionRepository
from server.registry.exports.service import move
from server.registry.models import StoredVersion
from server.registry.trajectories.reconstruction import b_file
from server.settings import Settings
from server.storage.store import ArtifactStore, hold
from server.tasks.child_process import Stopped
from server.tasks.handlers import TaskRun
from shared.errors import BaseMismatch, ConversionFailed, ConversionTooLarge, MobizoError, Unavailable
from shared.job import JobError
from shared.protocol import MergedForm, PeftFile

_MAX_DETAIL = 4000
_log = structlog.get_logger()


@dataclass(frozen=True)
class ConversionOrder:
    """A conversion that a worker runs, with the path of the base model."""

    id: str
    version: StoredVersion
    source: str
    form: MergedForm


@dataclass(frozen=True)
class ConversionHandler:
    """Merges adapters into their bases in child processes."""

    settings: Settings
    database: Database
    artifacts: ArtifactStore

    kind: ClassVar[str] = CONVERT
    subject_name: ClassVar[str] = "conversion"

    def lock(self, session: Session, subject: str, *, signs: bool = False) -> bool:
        """Locks the conversion, which is deleted together with its version."""
        return ConversionRepository(session).get_locked(subject) is not None

    def begin(self, session: Session, subject: str) -> ConversionOrder:
        """Starts the conversion and returns its order. Raises BaseMismatch if its base is no longer registered."""
        conversions = ConversionRepository(session)
        conversion = conversions.get_one(subject)
        _, version = conversions.version(conversion)
        base = BaseRepository(session).by_name(version.recipe.base.name)
        if base is None or base.sha256 != version.recipe.base.sha256:
            raise BaseMismatch
        move(conversion, ConversionState.CONVERTING, started_at=utc_now())
        return ConversionOrder(conversion.id, version, base.source, conversion.form)

    def heartbeat(self, session: Session, order: ConversionOrder) -> None:
        """A conversion has no progress to show."""

    def run(self, order: ConversionOrder, run: TaskRun) -> list[PeftFile] | Stopped:
        """Merges the adapter and stores the files."""
        version, log = order.version, _log.bind(conversion=order.id)
        converter = ConverterProcess(
            command=self.settings.converter_command,
            interval=run.interval,
            memory_limit=self.settings.compile_memory_bytes,
            keep=run.should_continue,
            on_stage=lambda stage: log.info("converting", stage=stage),
        )
        run.process = converter
        with self.artifacts.workspace(run.worker_id) as workspace:
            merge = Order(recipe=version.recipe, shape=version.shape, a_sha256=version.a_sha256, form=order.form)
            raw_b = self.artifacts.read(b_file(self.database, self.artifacts, version))
            calibration = calibration_file(self.artifacts, version.recipe)
            files = converter.run(merge, raw_b, order.source, workspace, calibration)
            if not isinstance(files, Stopped):
                for file in files:
                    self.artifacts.adopt(workspace / RESULT / file.path, file.sha256)
        return files

    def publish(self, session: Session, order: ConversionOrder, result: list[PeftFile]) -> bool:
        """Publishes the files for download."""
        hold(session, self.artifacts, [file.sha256 for file in result])
        conversions = ConversionRepository(session)
        conversion = conversions.get_one(order.id)
        conversions.add_files(
            [
                ConversionFile(conversion_number=conversion.number, path=file.path, size=file.size, sha256=file.sha256)
                for file in result
            ]
        )
        move(conversion, ConversionState.READY, ready_at=utc_now(), error=None)
        return True

    def wait(self, session: Session, subject: str, pause: float | None, attempts_left: int) -> None:
        """Moves the conversion back to waiting."""
        move(ConversionRepository(session).get_one(subject), ConversionState.PENDING)

    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Stores the error; a new request tries again."""
        reason = JobError(code=error.code, detail=error.detail[:_MAX_DETAIL])
        move(ConversionRepository(session).get_one(subject), ConversionState.FAILED, error=reason)

    def is_transient(self, error: MobizoError) -> bool:
        """Crashes and outages are retried; errors that the converter reports are not."""
        return isinstance(error, ConverterCrashed | Unavailable)

    def too_large(self, memory_bytes: int, most_bytes: int) -> MobizoError:
        """Returns the error of a conversion that no machine has memory for."""
        return ConversionTooLarge(
            f"merging this takes about {memory_bytes:,} bytes of memory, and no machine with workers may give "
            f"more than {most_bytes:,} (MOBIZO_COMPILE_BUDGET_BYTES); take the adapter by itself, or a larger machine"
        )

    def killed(self) -> MobizoError:
        """Returns the error of a conversion whose process was killed in every attempt."""
        return ConversionFailed("the converter was killed every time; is there enough memory?")
