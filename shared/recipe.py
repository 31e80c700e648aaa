"""A recipe: everything that shapes a program. Its canonical JSON's sha256 is the recipe id.

Knows neither how a program is compiled nor who asks for it.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shared.canonical import canonical_json, sha256_hex

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)  # canonical order, the order of modules in flat B
Loss = Literal["full", "candidates"]
Noise = Literal["rademacher", "gaussian"]

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_SEED = 2**53 - 1  # the largest integer that JSON carries exactly


class BaseRef(BaseModel):
    """A base model, named for people and pinned by the sha256 of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=200)
    sha256: Sha256


class RecipeSettings(BaseModel):
    """What a client may choose of a recipe. Rank 16, alpha 32, q = 4 and E = 4 are the paper's; targets are ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(16, ge=1, le=256, description="LoRA rank r")
    alpha: float = Field(32, gt=0, allow_inf_nan=False, description="LoRA alpha; the adapter's scale is alpha / rank")
    targets: tuple[Target, ...] = Field(("q_proj", "v_proj"), min_length=1)
    layers: Literal["all"] = "all"
    a_seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of the frozen A matrices")
    queries: int = Field(4, ge=1, le=64, description="q: random directions per step; 2q paths run at once")
    effective_batch: int = Field(4, ge=1, le=256, description="E: examples per path")
    sequence_length: int = Field(64, ge=2, le=8192, description="S: tokens per example, prompt and answer")
    answer_length: int | None = Field(None, ge=1, le=512, description="T: most answer tokens; null: from the task")
    choices: int | None = Field(None, ge=1, le=64, description="C: most answer candidates; null: from the task")
    loss: Loss = "full"
    noise: Noise = "rademacher"
    estimator: Literal["replay"] = "replay"
    precision: Literal["fp32"] = "fp32"
    backend: Literal["xnnpack", "portable"] = "xnnpack"

    @field_validator("targets")
    @classmethod
    def _canonical_targets(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(targets)) != len(targets):
            raise ValueError("name each target once")
        return tuple(target for target in TARGETS if target in targets)


class Recipe(RecipeSettings):
    """A complete recipe: the settings, all of them concrete, and the base model they apply to."""

    format: Literal[1] = 1
    base: BaseRef
    answer_length: int = Field(ge=1, le=512)
    choices: int = Field(ge=1, le=64)

    @property
    def id(self) -> str:
        """sha256 of the recipe's canonical JSON, 64 hexadecimal digits."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    @property
    def paths(self) -> int:
        """n = 2q: perturbed copies of B that one step runs."""
        return 2 * self.queries

    @property
    def scale(self) -> float:
        """alpha / r: what multiplies x A B."""
        return self.alpha / self.rank

    @property
    def score_rows(self) -> int:
        """R = 2 q E: sequences that one `score` call takes, as many as a step runs."""
        return self.paths * self.effective_batch
