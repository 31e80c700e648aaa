"""What a base model could do here, from its configuration and the headers of its files, before it is registered."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import get_args

from pydantic import BaseModel, Field

from server.catalog.chat_templates import has_chat_template
from server.compiler.checkpoints.checkpoint import inspect_headers
from server.compiler.cost import compile_bytes
from server.database.columns import view_of
from server.jobs.memory import predicted_peak
from shared.errors import InvalidRecipe
from shared.precisions import check_precision
from shared.recipe import (
    REVERSE_BACKENDS,
    REVERSE_ESTIMATORS,
    REVERSE_PRECISIONS,
    Backend,
    BaseRef,
    Estimator,
    Precision,
    Recipe,
    trainable_precisions,
)
from shared.zo.lora import BaseShape

ESTIMATORS: tuple[Estimator, ...] = ("replay", "gradient")  # whose memory is predicted; the others need about as much
ANSWER_LENGTH, CHOICES = 1, 2  # of the recipe whose memory is predicted: one token of two


class PrecisionCheck(BaseModel):
    """One precision of a base: what can train in it, and the memory of the default recipe."""

    estimators: tuple[Estimator, ...]
    backends: tuple[Backend, ...]
    compile_bytes: int = Field(description="predicted peak of compiling, on the server")
    device_bytes: dict[Estimator, int] = Field(description="predicted peak of training on a device, by estimator")


class BaseCheck(BaseModel):
    """The facts of a base that is supported."""

    source: str
    shape: BaseShape
    parameters: int
    chat_template: bool
    precisions: dict[Precision, PrecisionCheck]

    @property
    def lines(self) -> list[str]:
        """As a person reads it."""
        shape = self.shape
        text = [
            f"{self.source}: {shape.architecture}, {self.parameters / 1e6:,.0f} M parameters, {shape.layers} layers, "
            f"{shape.context_length:,} tokens of context",
            f"chat template: {'yes' if self.chat_template else 'no'}",
        ]
        for precision, check in self.precisions.items():
            needs = ", ".join(f"{name} {_gigabytes(size)}" for name, size in check.device_bytes.items())
            text.append(
                f"{precision}: estimators {' '.join(check.estimators)}; back ends {' '.join(check.backends)}; memory: "
                f"server {_gigabytes(check.compile_bytes)} to compile; device {needs}"
            )
        return text


def check_base(source: str) -> BaseCheck:
    """Checks the model at `source`, a directory, a .gguf file or a Hugging Face id. No weight is read or downloaded.

    Raises UnknownBase, UnreadableCheckpoint, or UnsupportedModel, which names what would work instead.
    """
    facts, files = inspect_headers(source)
    shape = view_of(BaseShape, facts)
    precisions: dict[Precision, PrecisionCheck] = {}
    for precision in trainable_precisions():
        with suppress(InvalidRecipe):
            check_precision(precision, shape)
            precisions[precision] = _check(precision, shape, facts.parameters, facts.sha256)
    return BaseCheck(
        source=source,
        shape=shape,
        parameters=facts.parameters,
        chat_template=has_chat_template(files),
        precisions=precisions,
    )


def _check(precision: Precision, shape: BaseShape, parameters: int, sha256: str) -> PrecisionCheck:
    reverse = precision in REVERSE_PRECISIONS
    try:
        check_precision(precision, shape, reverse=reverse)
    except InvalidRecipe:  # whole groups of inputs, but not of outputs
        reverse = False
    estimators = tuple(name for name in get_args(Estimator) if reverse or name not in REVERSE_ESTIMATORS)
    recipes: Mapping[Estimator, Recipe] = {
        estimator: Recipe(
            base=BaseRef(name="base", sha256=sha256),
            precision=precision,
            estimator=estimator,
            answer_length=ANSWER_LENGTH,
            choices=CHOICES,
        )
        for estimator in ESTIMATORS
        if estimator in estimators
    }
    return PrecisionCheck(
        estimators=estimators,
        backends=REVERSE_BACKENDS if precision == "fp32" else ("xnnpack",),
        compile_bytes=max(compile_bytes(recipe, shape, parameters) for recipe in recipes.values()),
        device_bytes={name: predicted_peak(recipe, shape, parameters) for name, recipe in recipes.items()},
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
