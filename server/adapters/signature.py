"""A version's manifest and the server's signature over it. Knows no HTTP and no database."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from server.adapters.models import Adapter, StoredVersion
from server.jobs.models import Job
from shared.registry import AdapterManifest, Parent
from shared.signing import sign_adapter


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


def sign(version: StoredVersion, manifest: AdapterManifest, key: Ed25519PrivateKey) -> None:
    """Gives a version its manifest, revision and signature."""
    signed = sign_adapter(manifest, key)
    version.manifest, version.revision = manifest, manifest.revision
    version.key_id, version.signature = signed.key_id, signed.signature
