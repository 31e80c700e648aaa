"""What a job needs of a device, and whether a device has it, in words. Knows no database and no HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from shared.capabilities import NOISE_OPERATOR, Capabilities, Labels, may_take_part
from shared.job import JobRequest
from shared.program import ProgramManifest
from shared.recipe import Backend, Recipe
from shared.versions import release, satisfies


class Needs(BaseModel):
    """What a device must have; a field left out asks for nothing. Sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: Labels = {}
    total_bytes: int | None = None  # that the job asks for
    program_bytes: int | None = None  # weights and planned memory, where too little would only be declined
    backend: Backend | None = None
    operator: str | None = None
    executorch: str | None = None  # that the program was made with; an older runtime may not know its format
    executorch_asked: str | None = None  # conditions that the job states
    charging: bool = False
    battery_floor: float | None = None
    cohort: str | None = None  # whose round the job is of: its device's owner must have agreed to take part


@dataclass(frozen=True)
class Asking:
    """A device that asks for a job. memory_bytes: what it can spare."""

    tenant: str
    device_id: str
    datasets: frozenset[str]
    memory_bytes: int | None = None
    capabilities: Capabilities | None = None
    labels: Labels = field(default_factory=dict)
    declined: frozenset[str] = frozenset()  # recipes that it could not hold
    rests: bool = False  # failed too many jobs in a row to be given another now
    may_hold: bool = False  # has a job, or had one that it may have again


@lru_cache(maxsize=4096)
def parse_needs(text: str) -> Needs:
    """Needs as a lane keeps them; a lane's never change."""
    return Needs.model_validate_json(text)


def needs_of(request: JobRequest, recipe: Recipe, manifest: ProgramManifest | None, cohort: str | None = None) -> Needs:
    """What a job needs: what it asks for, what its recipe takes, and what its program says if it is there.

    cohort: whose round it is of.
    """
    asked, rules = request.requires, request.rules
    # A device that has too little may decline, and the job then shrinks, or fails where no other device may train it.
    fits_or_waits = manifest is not None and not request.shrink and request.device is None
    made_by_executorch = manifest is not None and recipe.backend != "torch"
    return Needs(
        labels=asked.labels,
        total_bytes=asked.memory_bytes,
        program_bytes=program_bytes(manifest) if manifest is not None and fits_or_waits else None,
        backend=recipe.backend,
        operator=NOISE_OPERATOR if recipe.noise == "operator" else None,
        executorch=manifest.executorch if manifest is not None and made_by_executorch else None,
        executorch_asked=asked.executorch,
        charging=rules.charging,
        battery_floor=rules.battery_floor,
        cohort=cohort,
    )


def program_bytes(manifest: ProgramManifest) -> int:
    """What training takes, as devices count it: the weights and the memory that the runtime plans."""
    return manifest.file("weights").size + manifest.planned_bytes


def able(needs: Needs, asking: Asking) -> bool:
    """Whether a device may be given a job with these needs."""
    return next(lacks(needs, asking), None) is None


def lacks(needs: Needs, asking: Asking) -> Iterator[str]:
    """What a device lacks, each as the end of `no device has ...`: "label site=lab".

    A device that does not say is believed to have what every agent has, and nothing that a job asks for by itself.
    """
    can = asking.capabilities or Capabilities.model_validate({})
    for name, value in needs.labels.items():
        if asking.labels.get(name) != value:
            yield f"label {name}={value}"
    if needs.cohort is not None and not may_take_part(can.cohorts, needs.cohort):
        yield f"its owner's leave to take part in cohort {needs.cohort} (`cohorts` in the agent's rules.toml)"
    yield from _memory(needs, asking, can)
    if needs.backend is not None and can.backends is not None and needs.backend not in can.backends:
        yield f"backend {needs.backend}"
    if needs.operator is not None and needs.operator not in (can.operators or ()):
        yield f"operator {needs.operator}, which the native runner brings"
    if _older(can.executorch, needs.executorch):
        yield f"ExecuTorch {needs.executorch} or later"
    if needs.executorch_asked is not None and not (
        can.executorch is not None and satisfies(can.executorch, needs.executorch_asked)
    ):
        yield f"ExecuTorch {needs.executorch_asked}"
    yield from _power(needs, can)


def _memory(needs: Needs, asking: Asking, can: Capabilities) -> Iterator[str]:
    if needs.total_bytes is not None and (can.total_bytes is None or can.total_bytes < needs.total_bytes):
        yield f"{needs.total_bytes:,} bytes of memory"
    # Old agents say what they can spare and nothing else; they decline, and are asked again when they have more.
    told = None if asking.capabilities is None else asking.memory_bytes
    if needs.program_bytes is not None and told is not None and told < needs.program_bytes:
        yield f"{needs.program_bytes:,} bytes of memory to spare, which its program takes"


def _older(version: str | None, least: str | None) -> bool:
    if version is None or least is None:
        return False
    try:
        return release(version) < release(least)
    except ValueError:
        return False  # a program made by a build without a number


def _power(needs: Needs, can: Capabilities) -> Iterator[str]:
    if can.charging is not False:
        return
    if needs.charging:
        yield "external power now"
    elif (
        needs.battery_floor is not None
        and can.battery_percent is not None
        and can.battery_percent < needs.battery_floor
    ):
        yield f"external power now, or its battery at {needs.battery_floor:g} %"
