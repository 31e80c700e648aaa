"""A version's manifest and the server's signature over it. Knows no HTTP and no database."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from server.adapters.models import Adapter, StoredVersion
from server.jobs.models import Job
from shared.cohort import CohortOrigin
from shared.job import Result, TrainingSettings
from shared.lora import BaseShape
from shared.recipe import Recipe
from shared.registry import AdapterManifest, Parent
from shared.signing import sign_adapter
from shared.task import Task


def make_manifest(adapter: Adapter, version: StoredVersion, job: Job, parent: Parent | None) -> AdapterManifest:
    """The facts of a version."""
    return AdapterManifest(
        tenant=adapter.tenant,
        adapter=adapter.name,
        version=version.version,
        user=adapter.user,
        base=version.recipe.base,
        recipe=version.recipe,
        recipe_id=version.recipe_id,
        a_sha256=version.a_sha256,
        sha256=version.sha256,
        size=version.size,
        size_d=version.size_d,
        job_id=version.job_id,
        device_id=version.device_id,
        parent=parent,
        task=job.task,
        training=job.request.training,
        result=version.result,
        created_at=version.created_at,
    )


@dataclass(frozen=True)
class RoundVersion:
    """What a cohort's round made: the LoRA-B file, its facts, and how it came to be."""

    recipe: Recipe
    shape: BaseShape
    a_sha256: str
    sha256: str
    size: int
    size_d: int
    task: Task
    training: TrainingSettings
    result: Result
    parent: Parent | None
    origin: CohortOrigin


def make_round_manifest(adapter: Adapter, version: StoredVersion, made: RoundVersion) -> AdapterManifest:
    """The facts of a version that a round made."""
    return AdapterManifest(
        tenant=adapter.tenant,
        adapter=adapter.name,
        version=version.version,
        user=adapter.user,
        base=made.recipe.base,
        recipe=made.recipe,
        recipe_id=made.recipe.id,
        a_sha256=made.a_sha256,
        sha256=made.sha256,
        size=made.size,
        size_d=made.size_d,
        job_id=None,
        device_id=None,
        parent=made.parent,
        cohort=made.origin,
        task=made.task,
        training=made.training,
        result=made.result,
        created_at=version.created_at,
    )


def sign(version: StoredVersion, manifest: AdapterManifest, key: Ed25519PrivateKey) -> None:
    """Gives a version its manifest, revision and signature."""
    signed = sign_adapter(manifest, key)
    version.manifest, version.revision = manifest, manifest.revision
    version.key_id, version.signature = signed.key_id, signed.signature
