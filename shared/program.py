"""What a compiled program is to the outside: its methods, their inputs, and the manifest that vouches for its files.

Knows neither the compiler nor the runtime.

Methods (n = 2q paths; path p < q is B + eps z_p, path q + p is B - eps z_p; integers are TOKEN_DTYPE, scalars [1]).
S is any length from MIN_LENGTH to the recipe's where the manifest says `dynamic_length`, else the recipe's:

    step     full:       tokens (E,S), positions (E,T), answers (E,T), mask (E,T), seeds (q,2), lr, eps
             candidates: tokens (E,S), positions (E,T), choices (E,T,C), choice_mask (E,T,C), mask (E,T), seeds, lr, eps
             -> losses (2q,), coefficients (q,); B has moved by -sum coefficients_i z_i, in order
             With privacy `clipped` both take clip [1] and carried (q,) besides, the secret noise in whole units of
             clip / UNITS (shared.privacy), and the totals (q,) in these units stand in place of the losses: carried,
             and each example's loss differences, clipped together. A row whose mask is all 0 adds exactly nothing.
    replay   seeds (q,2), coefficients (q,) -> first element of B (1,); the update alone, as `step` does it
    score    tokens (R,S), positions (R,T), choices (R,T,C) -> log-probabilities (R,T,C) over the whole vocabulary
    adapter  -> B (D,)
    load     B (D,) -> first element of B (1,)

Where the recipe leaves the lowest layers frozen, `step` is `suffix` after `prefix`, to the bit:

    prefix   tokens (E,S) -> hidden (E,S,hidden): the state before the first adapted layer, the same whatever B is
    suffix   as `step`, with hidden (E,S,hidden) in place of tokens

With estimator `stored` (the paper's Algorithm 2) a step's update is applied by the next step. `adapter` and `score` see
it applied; `replay` takes eps after its coefficients, since the stored copies depend on it; and there is

    flush    -> first element of B (1,); applies the update that the last step left

The inference file (role `inference`, where the backend has one) holds one sequence's key-value cache of the manifest's
`inference_context` C tokens, and its own B (D,), whatever the estimator. `load` comes before the first `extend`:

    extend   tokens (1,L), start [1], picks (P,) -> logits (P,V) at rows `picks` of these L tokens, which take the
             cache's places from `start` on and see what lies before; L and P are any from 1 to S and to T
    adapter  -> B (D,)
    load     B (D,) -> first element of B (1,); empties the cache, which another B may have made
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from shared.canonical import canonical_json
from shared.lora import BaseShape
from shared.recipe import Recipe, Sha256

TOKEN_DTYPE = np.int64
SEED_DTYPE = np.int32

MIN_LENGTH = 2  # tokens of the shortest sequence that a program of dynamic length takes

METHODS = ("step", "replay", "score", "adapter", "load")  # of every program; `randn` noise has no replay
PREFIX_METHODS = ("prefix", "suffix")
STORED_METHODS = ("flush",)

Role = Literal["program", "weights", "tokenizer", "inference"]


class ProgramFile(BaseModel):
    """One file of a program, addressed by its content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Role
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="a plain file name, no directories")
    size: int = Field(ge=0)
    sha256: Sha256


class ProgramManifest(BaseModel):
    """Everything a device must know of a program before it trusts and runs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    version: int = Field(1, ge=1, description="rises with the recipe's programs; devices refuse a lower one")
    recipe: Recipe
    recipe_id: Sha256
    shape: BaseShape
    size: int = Field(ge=1, description="D: elements of flat B")
    a_sha256: Sha256
    score_rows: int = Field(ge=1, description="R")
    methods: tuple[str, ...] = METHODS
    dynamic_length: bool = Field(False, description="sequences shorter than the recipe's cost less")
    inference_context: int | None = Field(None, ge=1, description="C: tokens the inference file holds; null: no file")
    files: tuple[ProgramFile, ...]
    planned_bytes: int = Field(ge=0, description="activation memory the runtime plans, all methods, bytes")
    flops_per_step: int = Field(ge=0)
    delegates: int = Field(ge=0)
    nodes: int = Field(ge=0)
    executorch: str

    @field_validator("files")
    @classmethod
    def _one_of_each(cls, files: tuple[ProgramFile, ...]) -> tuple[ProgramFile, ...]:
        if sorted(file.role for file in files if file.role != "inference") != ["program", "tokenizer", "weights"]:
            raise ValueError("a program has exactly one program, one weights and one tokenizer file")
        if sum(file.role == "inference" for file in files) > 1:
            raise ValueError("a program has at most one inference file")
        if len({file.name for file in files}) != len(files):
            raise ValueError("two files share a name")
        return files

    def file(self, role: Role) -> ProgramFile:
        """The file of one role."""
        return next(file for file in self.files if file.role == role)

    @property
    def training_files(self) -> tuple[ProgramFile, ...]:
        """The files that training needs."""
        return tuple(file for file in self.files if file.role != "inference")

    def canonical(self) -> bytes:
        """The bytes that are signed."""
        return canonical_json(self.model_dump(mode="json"))


class SignedManifest(BaseModel):
    """A manifest and the server's Ed25519 signature over its canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: ProgramManifest
    key_id: str
    signature: str = Field(description="Ed25519, base64")
