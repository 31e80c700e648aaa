"""Whether a trajectory yields the adapter that it came with, found before the job is completed. Knows no HTTP.

The replay holds no transaction: `begin` looks at the lease before, and who completes the job looks again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.artifacts.store import ArtifactStore
from server.db.database import Database
from server.history.intake import header_of
from server.history.recording import Proof, check_sent
from server.history.remaking import start_of
from server.history.turns import turn
from server.leases.models import Ending
from server.leases.service import LeaseService
from server.leases.uploads import UploadService
from server.settings import Settings
from shared.canonical import sha256_hex
from shared.errors import NotReplayable, TrajectoryMismatch
from shared.job import TrainingSettings
from shared.ledger import check_result, check_run, read_ledger
from shared.lora import F32, adapter_file, split_adapter
from shared.program import ProgramManifest
from shared.protocol import Completion
from shared.replay import replay
from shared.trajectory import Trajectory, TrajectoryHeader


@dataclass(frozen=True)
class Claim:
    """A completion that names a trajectory, and what its lease's job is. uploaded: the adapter file is there, too."""

    device_id: str
    lease_id: str
    completion: Completion
    tenant: str
    header: TrajectoryHeader
    training: TrainingSettings
    manifest: ProgramManifest
    uploaded: bool


@dataclass(frozen=True)
class ProofService:
    """Proofs of one server."""

    database: Database
    artifacts: ArtifactStore
    settings: Settings

    def begin(self, device_id: str, lease_id: str, completion: Completion) -> Claim | None:
        """What is to be proved; None if the job was completed before. Raises Conflict, NotFound or Gone."""
        with self.database.writing() as session:
            leases = LeaseService(session, self.settings.lease_seconds)
            lease, job = leases.find(device_id, lease_id)
            if lease.ending is Ending.COMPLETED:
                return None
            leases.hold(lease)
            check_sent(lease, completion)
            manifest = leases.manifest(job).manifest
            return Claim(
                device_id,
                lease_id,
                completion,
                tenant=job.tenant,
                header=header_of(session, job, manifest),
                training=job.request.training,
                manifest=manifest,
                uploaded=lease.upload_sha256 == completion.adapter_sha256,
            )

    def prove(self, claim: Claim) -> Proof:
        """What the claim's trajectory proves.

        Raises TrajectoryMismatch if it yields another adapter file, InvalidTrajectory, NotReplayable if the file must
        be uploaded, too, or Unavailable.
        """
        result, sha256 = claim.completion.result, claim.completion.trajectory_sha256 or ""
        data = self.artifacts.read(sha256)
        trajectory = read_ledger(data)
        check_run(trajectory, claim.header, claim.training)
        check_result(trajectory, result)
        why = self._unproven(claim, trajectory)
        if why is not None and not claim.uploaded:
            raise NotReplayable(f"upload the adapter, too: {why}")
        flat = self._replay(claim, trajectory) if why is None else None
        file = self.artifacts.read(claim.completion.adapter_sha256) if claim.uploaded else None
        made = None
        if flat is not None:
            made = _check(claim, flat, file)
        head, _ = split_adapter(file or made or b"", claim.manifest.size)
        return Proof(
            sha256=sha256,
            size=len(data),
            steps=trajectory.steps,
            start_sha256=trajectory.header.start_sha256,
            head=head,
            verified=flat is not None,
            made=made if file is None else None,
        )

    def keep(self, claim: Claim, made: bytes) -> None:
        """Makes the file that was made of a trajectory the lease's upload, with all the checks of one."""
        settings = self.settings
        uploads = UploadService(self.database, self.artifacts, settings.lease_seconds, settings.upload_rms_limit)
        uploads.upload(claim.device_id, claim.lease_id, claim.manifest.size, made)

    def _unproven(self, claim: Claim, trajectory: Trajectory) -> str | None:
        """Why a trajectory is not replayed here; None if it is."""
        recipe, size = claim.manifest.recipe, claim.manifest.size
        if recipe.noise != "rademacher" or recipe.estimator != "replay":
            return f"a run with noise {recipe.noise!r} and estimator {recipe.estimator!r} is exact on its device alone"
        updates = trajectory.steps * recipe.queries * size
        most = self.settings.replay_updates
        if updates > most:
            return f"replaying it takes {updates:,} updates, and this server makes {most:,} at most"
        return None

    def _replay(self, claim: Claim, trajectory: Trajectory) -> F32:
        start = start_of(self.database, self.artifacts, claim.tenant, claim.header)
        with turn():
            return replay(trajectory, start, claim.completion.result.best_step)


def _check(claim: Claim, flat: F32, file: bytes | None) -> bytes | None:
    """The adapter file made of flat B (D,) if none was uploaded. Raises TrajectoryMismatch if it is not the claimed."""
    step, manifest = claim.completion.result.best_step, claim.manifest
    if file is not None:
        theirs = np.frombuffer(split_adapter(file, manifest.size)[1], "<u4")
        differing = int(np.count_nonzero(theirs != flat.astype("<f4").view("<u4")))
        if differing:
            raise TrajectoryMismatch(
                f"after {step} steps the trajectory yields another B: {differing:,} of its {manifest.size:,} elements "
                "differ; nothing was lost: complete the job without the trajectory"
            )
        return None
    made = adapter_file(
        flat, job_id=claim.header.job_id, recipe_id=manifest.recipe_id, a_sha256=manifest.a_sha256, step=step
    )
    if sha256_hex(made) != claim.completion.adapter_sha256:
        raise TrajectoryMismatch(
            f"after {step} steps the trajectory yields another adapter file than {claim.completion.adapter_sha256}; "
            "nothing was lost: upload that file and complete the job without the trajectory"
        )
    return made
