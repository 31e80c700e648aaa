"""Requesting conversions and reading them; how a conversion changes; how much memory it takes."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry, BaseRepository
from server.database.columns import new_id, utc_now
from server.database.database import add_if_absent
from server.registry.exports.models import CONVERT, Conversion, ConversionFile, ConversionState
from server.registry.exports.repository import ConversionRepository
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import resolve
from server.tasks.repository import TaskService
from shared.errors import BaseMismatch, Conflict, FileNotInAdapter, NotFound, UnknownBase
from shared.protocol import MergedForm, MergedModel, PeftFile
from shared.recipe import Recipe
from shared.zo.lora import BaseShape, flat_size, lora_modules

SHARD_BYTES = 1 << 30  # of a merged model's weight files, unless one tensor is larger
LIBRARIES_BYTES = 450 << 20  # torch, and transformers where a tokenizer is converted


def merge_bytes(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Peak resident bytes of merging an adapter into a base of that shape and so many parameters.

    One file's tensors at a time, and once more as they are written; the largest tensor as read; A and B.
    """
    largest = 4 * max(shape.vocabulary * shape.hidden, *(i * o for i, o in map(shape.features, shape.linears)))
    shard = min(4 * parameters, max(SHARD_BYTES, largest))
    a_elements = sum(module.in_features * module.rank for module in lora_modules(recipe, shape))
    return LIBRARIES_BYTES + 2 * shard + 2 * largest + 4 * (a_elements + 2 * flat_size(recipe, shape))


TRANSITIONS: dict[ConversionState, frozenset[ConversionState]] = {
    ConversionState.PENDING: frozenset({ConversionState.CONVERTING, ConversionState.FAILED}),
    ConversionState.CONVERTING: frozenset({ConversionState.PENDING, ConversionState.READY, ConversionState.FAILED}),
    ConversionState.READY: frozenset(),
    ConversionState.FAILED: frozenset({ConversionState.PENDING}),  # requested again, because the cause may be gone
}


def move(conversion: Conversion, state: ConversionState, **changes: Any) -> None:
    """Moves a conversion to `state` and sets other columns with it. Raises Conflict if the move is not allowed."""
    if state not in TRANSITIONS[conversion.state]:
        raise Conflict(f"the conversion {conversion.id} is {conversion.state}; it cannot become {state}")
    conversion.state = state
    for name, value in changes.items():
        setattr(conversion, name, value)


class MergedService:
    """Merged models in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._conversions = ConversionRepository(session)

    def request(self, tenant: str, name: str, version: int, form: MergedForm) -> MergedModel:
        """Requests a version's merged model, which is made at most once a form and tried again if it failed before.

        Raises AdapterNotFound, RevisionNotFound, UnknownBase or BaseMismatch.
        """
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        base = self._base(stored)
        memory_bytes, now = merge_bytes(stored.recipe, stored.shape, base.parameters), utc_now()
        add_if_absent(
            self._session,
            Conversion,
            id=new_id("conversion"),
            version_number=stored.number,
            form=form,
            state=ConversionState.PENDING,
            created_at=now,
        )
        conversion = self._conversions.of_version_locked(stored, form)
        if conversion.state is ConversionState.FAILED:
            move(conversion, ConversionState.PENDING, error=None, created_at=now)
        if conversion.state is not ConversionState.READY:
            tasks = TaskService(self._session)
            tasks.schedule(CONVERT, conversion.id, memory_bytes)
            tasks.request(CONVERT, conversion.id, conversion.id, tenant)
        return self._view(adapter, stored, conversion)

    def get(self, tenant: str, name: str, version: int, form: MergedForm) -> MergedModel:
        """Returns the state of a merged model.

        Raises AdapterNotFound, RevisionNotFound, or NotFound if it was never requested.
        """
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        return self._view(adapter, stored, self._conversion(stored, form))

    def file(self, tenant: str, name: str, version: int, path: str, form: MergedForm) -> ConversionFile:
        """Returns a file of a merged model that is ready. Raises FileNotInAdapter and the errors of `get`."""
        _, stored = resolve(self._session, tenant, name, f"v{version}")
        for file in self._conversions.files(self._conversion(stored, form)):
            if file.path == path:
                return file
        raise FileNotInAdapter(f"the merged model of version {version} has no file {path[:200]!r}, or is not ready")

    def _conversion(self, stored: StoredVersion, form: MergedForm) -> Conversion:
        conversion = self._conversions.of_version(stored, form)
        if conversion is None:
            raise NotFound(
                f"no merged model of version {stored.version} was asked for in the form {form}; POST here asks for one"
            )
        return conversion

    def _base(self, stored: StoredVersion) -> BaseModelEntry:
        base_ref = stored.recipe.base
        base = BaseRepository(self._session).by_name(base_ref.name)
        if base is None:
            raise UnknownBase(f"the base model {base_ref.name!r} is not registered any more")
        if base.sha256 != base_ref.sha256:
            raise BaseMismatch(
                f"the adapter was trained on {base_ref.name!r} of sha256 {base_ref.sha256[:12]}..., and that name "
                f"stands for {base.sha256[:12]}... here"
            )
        return base

    def _view(self, adapter: Adapter, stored: StoredVersion, conversion: Conversion) -> MergedModel:
        files = self._conversions.files(conversion)
        return MergedModel(
            adapter=adapter.name,
            version=stored.version,
            form=conversion.form,
            state=conversion.state,
            files=[PeftFile(path=file.path, size=file.size, sha256=file.sha256) for file in files],
            error=conversion.error,
            created_at=conversion.created_at,
            ready_at=conversion.ready_at,
        )
