"""A recipe: everything that shapes a program. Its canonical JSON's sha256 is the recipe id.

Knows neither how a program is compiled nor who asks for it.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.canonical import canonical_json, sha256_hex
from shared.errors import InvalidRecipe

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)  # canonical order, the order of modules in flat B
Loss = Literal["full", "candidates"]
Noise = Literal["rademacher", "gaussian", "randn", "operator"]
Estimator = Literal["replay", "stored"]
RunPrivacy = Literal["none", "clipped"]
Precision = Literal["fp32", "int8", "int4", "int8-weight", "int4-weight"]
Backend = Literal["xnnpack", "portable", "torch", "qnn", "vulkan"]
Layers = str | tuple[int, ...]

RUNNER_BACKENDS: tuple[Backend, ...] = ("xnnpack", "portable")  # whose programs the native runner runs
PRIVATE_BACKENDS: tuple[Backend, ...] = ("xnnpack", "portable", "torch")  # whose sensitivity is tested

# The perturbation scale that keeps a precision's finite difference above its rounding noise (ADR 7).
DEFAULT_EPS: dict[Precision, float] = {
    "fp32": 1e-2,
    "int8": 5e-2,
    "int4": 5e-2,
    "int8-weight": 1e-2,
    "int4-weight": 1e-2,
}

# Correlation of projected gradients with fp32's at that scale: 64 directions, movie reviews, SmolLM2-135M
# (`python -m bench precision`, ADR 7). Below the least, training would follow rounding more than the data.
GRADIENT_CORRELATION: dict[Precision, float] = {
    "fp32": 1.0,
    "int8": 0.94,
    "int4": 0.75,
    "int8-weight": 0.99,
    "int4-weight": 0.57,
}
LEAST_CORRELATION = 0.9

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
    layers: Layers = Field(
        "all", description="adapted decoder layers: all, last:K, last:P% (at least one), or a list of indices from 0"
    )
    a_seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of the frozen A matrices")
    # Left out where there is none, so that the ids and signatures of recipes without it stay what they were.
    calibration: Sha256 | None = Field(
        None,
        exclude_if=lambda calibration: calibration is None,
        description="sha256 of a calibration (shared.calibration) that A is taken from; null: drawn from a_seed",
    )
    queries: int = Field(4, ge=1, le=64, description="q: random directions per step; 2q paths run at once")
    effective_batch: int = Field(4, ge=1, le=256, description="E: examples per path")
    sequence_length: int = Field(64, ge=2, le=8192, description="S: tokens per example, prompt and answer")
    answer_length: int | None = Field(None, ge=1, le=512, description="T: most answer tokens; null: from the task")
    choices: int | None = Field(None, ge=1, le=64, description="C: most answer candidates; null: from the task")
    loss: Loss = "full"
    noise: Noise = Field(
        "rademacher",
        description="randn: the runtime's own, unseedable; operator: gaussian's, by an operator that the native runner "
        "alone has; both only with stored",
    )
    estimator: Estimator = Field("replay", description="stored: the paper's Algorithm 2, two copies of B per query")
    precision: Precision = Field(
        "fp32", description="of frozen linear layers: int8 and int4 quantize activations too, on the fly (8da8w, 8da4w)"
    )
    backend: Backend = "xnnpack"
    # Left out where it is "none", so that the ids and signatures of recipes without it stay what they were.
    privacy: RunPrivacy = Field(
        "none",
        exclude_if=lambda privacy: privacy == "none",
        description="clipped: each example's loss differences are clipped and secret noise is added to their sums "
        "(shared.privacy); jobs of such a recipe say by how much",
    )

    @field_validator("targets")
    @classmethod
    def _canonical_targets(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(targets)) != len(targets):
            raise ValueError("name each target once")
        return tuple(target for target in TARGETS if target in targets)

    @field_validator("layers")
    @classmethod
    def _sorted_layers(cls, layers: Layers) -> Layers:
        if isinstance(layers, str):
            if not re.fullmatch(r"all|last:[1-9][0-9]*%?", layers):
                raise ValueError("say all, last:K, last:P%, or the layers' indices from 0")
            return layers
        if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError("name at least one layer, each once, counted from 0")
        return tuple(sorted(layers))

    @model_validator(mode="after")
    def _noise_of_estimator(self) -> RecipeSettings:
        if self.noise == "randn" and self.estimator != "stored":
            raise ValueError("noise 'randn' cannot be drawn again; it needs estimator 'stored'")
        if self.noise == "operator":
            if self.estimator != "stored":
                raise ValueError("noise 'operator' is Algorithm 2's; it needs estimator 'stored', or take 'gaussian'")
            if self.backend not in RUNNER_BACKENDS:
                raise ValueError(
                    "noise 'operator' is the native runner's, which runs backends xnnpack and portable; backend "
                    f"{self.backend} has 'gaussian', which draws the same"
                )
        return self

    @model_validator(mode="after")
    def _privacy_of_estimator(self) -> RecipeSettings:
        if self.privacy == "clipped":
            if self.estimator != "replay":
                raise ValueError("privacy 'clipped' is of estimator 'replay' alone")
            if self.backend not in PRIVATE_BACKENDS:
                raise ValueError(f"privacy 'clipped' is of backends {', '.join(PRIVATE_BACKENDS)} alone")
        return self


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

    def adapted_layers(self, count: int) -> tuple[int, ...]:
        """Indices of the adapted ones of `count` decoder layers, ascending. Raises InvalidRecipe if one is absent."""
        return layer_indices(self.layers, count)

    def frozen_layers(self, count: int) -> int:
        """Decoder layers below the first adapted one: no path has met its B yet, so they run once for all."""
        return self.adapted_layers(count)[0]


def layer_indices(layers: Layers, count: int) -> tuple[int, ...]:
    """The layers that `layers` names of a base of `count`, ascending; last:P% is rounded up to a whole layer.

    Raises InvalidRecipe if the base has fewer.
    """
    if isinstance(layers, tuple):
        if layers[-1] >= count:
            raise InvalidRecipe(f"layers names layer {layers[-1]}; the base's last one is {count - 1}")
        return layers
    if layers == "all":
        return tuple(range(count))
    match = re.fullmatch(r"last:(\d+)(%?)", layers)
    if match is None:
        raise InvalidRecipe(f"layers is {layers!r}; say all, last:K, last:P% or a list")
    number = int(match[1])
    last = math.ceil(count * number / 100) if match[2] else number
    if last > count:
        raise InvalidRecipe(f"layers is {layers!r}; the base has {count} layers")
    return tuple(range(count - last, count))


def resolve_layers(layers: Layers, count: int) -> Layers:
    """The canonical way to say `layers` for a base of `count` layers, so that one program has one recipe id.

    Raises InvalidRecipe if the base has fewer.
    """
    indices = layer_indices(layers, count)
    if indices == tuple(range(count)):
        return "all"
    if indices == tuple(range(count - len(indices), count)):
        return f"last:{len(indices)}"
    return indices


def check_trainable(precision: Precision) -> None:
    """Raises InvalidRecipe if the precision's projected gradients were measured to agree too little with fp32's."""
    if (correlation := GRADIENT_CORRELATION[precision]) < LEAST_CORRELATION:
        raise InvalidRecipe(
            f"precision {precision}: its projected gradients correlate with fp32's by {correlation:.2f} on "
            f"SmolLM2-135M, under {LEAST_CORRELATION}; training would follow rounding: use int8-weight or int8"
        )
