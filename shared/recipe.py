"""Recipes: all settings that shape a program. The sha256 of a recipe's canonical JSON is its id."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, FiniteFloat, field_validator, model_validator

from shared.canonical import canonical_json, sha256_hex
from shared.errors import InvalidRecipe
from shared.strict_model import StrictModel

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)  # canonical order: the order of modules in flat B
Loss = Literal["full", "candidates", "dpo", "kto"]
PREFERENCE_LOSSES: tuple[Loss, ...] = ("dpo", "kto")  # of pairs of rows, with reference log-probabilities
Noise = Literal["rademacher", "gaussian", "randn", "operator"]
Estimator = Literal["replay", "stored", "gradient", "directional"]
RequestedEstimator = Literal["auto", "replay", "stored", "gradient", "directional"]
Optimizer = Literal["sgd", "momentum", "adam"]
Perturbed = Literal["all", "answers"]
RunPrivacy = Literal["none", "clipped"]
Precision = Literal["fp32", "int8", "int4", "int8-weight", "int4-weight"]
Backend = Literal["xnnpack", "portable", "torch", "qnn", "vulkan"]
Layers = Annotated[str, Field(max_length=16)] | Annotated[tuple[int, ...], Field(max_length=1_000)]

RUNNER_BACKENDS: tuple[Backend, ...] = ("xnnpack", "portable")  # backends that the native runner supports
REVERSE_BACKENDS: tuple[Backend, ...] = ("xnnpack", "portable", "torch")  # backends with transposed products
# A reverse pass in int4 reads a second copy of the weights, in groups along the other axis. XNNPACK has no transposed
# kernel for 4-bit rows.
REVERSE_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4", "int8-weight")
REVERSE_ESTIMATORS: tuple[Estimator, ...] = ("gradient", "directional")  # estimators that run a reverse pass
# Estimators whose update is B -= c_i z_i with the recorded c_i, so that Rademacher runs replay bit for bit anywhere.
LEDGER_ESTIMATORS: tuple[Estimator, ...] = ("replay", "directional")
# Estimators with an implementation of privacy `clipped`.
PRIVATE_ESTIMATORS: tuple[Estimator, ...] = ("gradient", "directional", "replay")
PRIVATE_BACKENDS: tuple[Backend, ...] = ("xnnpack", "portable", "torch")  # backends whose privacy sensitivity is tested

DEFAULT_QUERIES: dict[Estimator, int] = {"replay": 4, "stored": 4, "gradient": 1, "directional": 256}
ANSWER_QUERIES = 512  # default q where the answer's positions alone are perturbed
MAX_PATH_QUERIES = 64  # q of estimators that run 2q paths at once
MAX_QUERIES = 512
DIRECTION_BLOCK = 1 << 20  # elements of directions that a program of estimator `directional` draws at once
MAX_DIRECTION_BLOCKS = 16  # of a step in a graph without loops, where each lengthens the compilation

# The perturbation scale that keeps a precision's finite difference above its rounding noise (ADR 28).
DEFAULT_EPS: dict[Precision, float] = {
    "fp32": 1e-2,
    "int8": 5e-2,
    "int4": 5e-2,
    "int8-weight": 1e-2,
    "int4-weight": 1e-2,
}

# Precisions whose models learn too little, and why (ADR 28).
UNTRAINABLE: dict[Precision, str] = {
    "int4-weight": "4 bits with one scale per row lose too much: on SmolLM2-135M, 40 steps of exact gradients end at "
    "77 % of movie reviews, where fp32 and int4, which has groups of 32, end at 87 %",
}

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
MAX_SEED = 2**53 - 1  # the largest integer that JSON carries exactly


class BaseRef(StrictModel):
    """A base model, identified by a name and the sha256 of its files."""

    name: str = Field(min_length=1, max_length=200)
    sha256: Sha256


class RequestedRecipe(StrictModel):
    """The recipe settings that a client may choose. With estimator `auto` the server chooses (shared.estimator_choice).

    Rank 16, alpha 32, q = 4 and E = 4 are the paper's defaults; the default targets are not from the paper.
    """

    rank: int = Field(16, ge=1, le=256, description="LoRA rank r")
    alpha: FiniteFloat = Field(32, gt=0, description="LoRA alpha; the adapter's scale is alpha / rank")
    targets: tuple[Target, ...] = Field(("q_proj", "v_proj"), min_length=1, max_length=len(TARGETS))
    layers: Layers = Field(
        "all", description="adapted decoder layers: all, last:K, last:P% (at least one), or a list of indices from 0"
    )
    a_seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of the frozen A matrices")
    # Omitted when null, so that ids and signatures of recipes without a calibration do not change.
    calibration: Sha256 | None = Field(
        None,
        exclude_if=lambda calibration: calibration is None,
        description="sha256 of a calibration (shared.zo.calibration) that A is taken from; null: drawn from a_seed",
    )
    queries: int | None = Field(
        None,
        ge=1,
        le=MAX_QUERIES,
        description=f"q: random directions per step. With estimators replay and stored, 2q paths run at once (default: "
        f"{DEFAULT_QUERIES['replay']}, at most {MAX_PATH_QUERIES}), or q paths with perturbed 'answers' (default: "
        f"{ANSWER_QUERIES}, at least 2); directional: default "
        f"{DEFAULT_QUERIES['directional']}; gradient: always 1. null: the estimator's default",
    )
    effective_batch: int = Field(
        4, ge=1, le=256, description="E: examples per path; with losses dpo and kto each takes two of them"
    )
    # Omitted when null, so that the ids and signatures of older recipes stay valid.
    micro_batch: int | None = Field(
        None,
        ge=1,
        le=256,
        exclude_if=lambda micro_batch: micro_batch is None,
        description="used only with estimators gradient and directional: examples that are computed at once, a divisor "
        "of E; their gradients are added up, and memory does not grow with E; null: E",
    )
    sequence_length: int = Field(64, ge=2, le=8192, description="S: tokens per example, prompt and answer")
    answer_length: int | None = Field(None, ge=1, le=512, description="T: most answer tokens; null: from the task")
    choices: int | None = Field(None, ge=1, le=64, description="C: most answer candidates; null: from the task")
    loss: Loss = Field(
        "full",
        description="full: over the whole vocabulary; candidates: over the possible continuations of a task's answers; "
        "dpo (Rafailov et al. 2023) and kto (Ethayarajh et al. 2024): of tasks of kind preference",
    )
    noise: Noise = Field(
        "rademacher",
        description="randn: the runtime's own, unseedable; operator: gaussian's, by an operator that the native runner "
        "alone has; both only with stored",
    )
    estimator: RequestedEstimator = Field(
        "auto",
        description="auto: the server chooses gradient, directional or replay by the job and its device; replay: "
        "forward passes only (MobiZO); stored: the paper's Algorithm 2, two copies of B per query; gradient: the exact "
        "gradient by a reverse pass, without directions (queries is 1); directional: the projections of the exact "
        "gradient, or of an optimizer's direction, on q directions, which replay as those of estimator replay do",
    )
    # Excluded if it is "adam", so that the ids and signatures of older recipes stay valid.
    optimizer: Optimizer = Field(
        "adam",
        exclude_if=lambda optimizer: optimizer == "adam",
        description="used only with estimators gradient and directional: sgd, momentum (0.9) or adam; adam with weight "
        "decay is AdamW; directional projects the optimizer's direction, and with privacy it is always sgd",
    )
    # Omitted when "all", so that the ids and signatures of older recipes stay valid.
    perturbed: Perturbed = Field(
        "all",
        exclude_if=lambda perturbed: perturbed == "all",
        description="used only with estimator replay. all: at every position, by the two paths B + eps z and B - eps z "
        "of each direction. answers: at the positions that predict answer tokens alone; all other tokens are computed "
        "once, with the current B, and their keys and values are shared; a direction has one path, B + eps z, whose "
        "loss is compared with the mean of all",
    )
    precision: Precision = Field(
        "fp32", description="of frozen linear layers: int8 and int4 quantize activations too, on the fly (8da8w, 8da4w)"
    )
    backend: Backend = "xnnpack"
    # Omitted when "none", so that ids and signatures of recipes without privacy do not change.
    privacy: RunPrivacy = Field(
        "none",
        exclude_if=lambda privacy: privacy == "none",
        description="clipped: each example's loss differences, or its gradient, are clipped and secret noise is added "
        "to their sums (shared.privacy); jobs of such a recipe say by how much",
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
            if not re.fullmatch(r"all|last:[1-9][0-9]{0,5}%?", layers):
                raise ValueError("must be all, last:K, last:P%, or layer indices from 0")
            return layers
        if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
            raise ValueError("name at least one layer, each once, counted from 0")
        return tuple(sorted(layers))

    @model_validator(mode="before")
    @classmethod
    def _queries_of_estimator(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("queries") is not None:
            return values
        estimator = values.get("estimator")
        if values.get("perturbed") == "answers" and estimator in (None, "replay"):
            return values | {"queries": ANSWER_QUERIES}
        if isinstance(estimator, str) and estimator in DEFAULT_QUERIES:
            return values | {"queries": DEFAULT_QUERIES[estimator]}
        return values

    @model_validator(mode="after")
    def _directions_of_estimator(self) -> Self:
        if self.estimator == "gradient" and (self.queries != 1 or self.noise != "rademacher"):
            raise ValueError("estimator 'gradient' has no directions; omit queries and noise")
        if self.estimator == "directional" and self.noise != "rademacher":
            raise ValueError(
                f"estimator 'directional' has no noise {self.noise!r}, because its runs are replayed bit for bit; "
                "omit noise"
            )
        one_pass = ("auto", *REVERSE_ESTIMATORS)
        if self.perturbed == "answers":
            return self._perturbing_answers()
        if self.estimator not in one_pass and self.queries is not None and self.queries > MAX_PATH_QUERIES:
            raise ValueError(
                f"estimator {self.estimator!r} runs 2q paths at once and has at most {MAX_PATH_QUERIES} queries; "
                f"estimator 'directional', and 'replay' with perturbed 'answers', have up to {MAX_QUERIES}"
            )
        return self

    def _perturbing_answers(self) -> Self:
        if self.estimator != "replay":
            raise ValueError(f"perturbed 'answers' needs estimator 'replay', not {self.estimator!r}")
        if self.backend != "xnnpack":
            raise ValueError(f"perturbed 'answers' needs backend xnnpack; with {self.backend}, use perturbed 'all'")
        if self.privacy == "clipped":
            raise ValueError("perturbed 'answers' has no privacy 'clipped'; use perturbed 'all', or another estimator")
        if self.queries is not None and self.queries < 2:
            raise ValueError("perturbed 'answers' compares directions with their mean and needs at least 2 queries")
        return self

    @model_validator(mode="after")
    def _reverse_pass_of_estimator(self) -> Self:
        if self.optimizer != "adam" and self.estimator not in ("auto", *REVERSE_ESTIMATORS):
            raise ValueError(f"optimizer {self.optimizer!r} needs estimator 'gradient' or 'directional'")
        if self.estimator not in ("auto", *REVERSE_ESTIMATORS):
            if self.micro_batch is not None:
                raise ValueError(
                    f"estimator {self.estimator!r} has no micro_batch; estimators 'gradient' and 'directional' have one"
                )
            return self
        if self.micro_batch is not None and (
            self.micro_batch == self.effective_batch or self.effective_batch % self.micro_batch
        ):
            raise ValueError(
                f"micro_batch {self.micro_batch} is not a proper divisor of effective_batch {self.effective_batch}; "
                "omit it to compute all examples at once"
            )
        if self.estimator == "auto":
            return self
        if self.backend not in REVERSE_BACKENDS:
            raise ValueError(
                f"backend {self.backend} has no reverse pass, which estimator {self.estimator!r} needs; backends "
                f"{', '.join(REVERSE_BACKENDS)} have one, and estimator 'replay' needs none"
            )
        if self.precision not in REVERSE_PRECISIONS:
            raise ValueError(
                f"precision {self.precision} has no reverse pass, which estimator {self.estimator!r} needs, because "
                "its weights cannot be multiplied transposed; use int4 or int8, or estimator 'replay'"
            )
        return self

    @model_validator(mode="after")
    def _noise_of_estimator(self) -> Self:
        if self.noise == "randn" and self.estimator != "stored":
            raise ValueError("noise 'randn' cannot be reproduced; it requires estimator 'stored'")
        if self.noise == "operator":
            if self.estimator != "stored":
                raise ValueError("noise 'operator' belongs to Algorithm 2; use estimator 'stored', or noise 'gaussian'")
            if self.backend not in RUNNER_BACKENDS:
                raise ValueError(
                    "noise 'operator' requires the native runner, which supports backends xnnpack and portable; with "
                    f"backend {self.backend} use 'gaussian', which gives the same numbers"
                )
        return self

    @model_validator(mode="after")
    def _privacy_of_estimator(self) -> Self:
        if self.privacy == "clipped":
            if self.estimator not in ("auto", *PRIVATE_ESTIMATORS):
                raise ValueError(
                    f"privacy 'clipped' requires estimator {', '.join(map(repr, PRIVATE_ESTIMATORS[:-1]))} or "
                    f"{PRIVATE_ESTIMATORS[-1]!r}"
                )
            if self.backend not in PRIVATE_BACKENDS:
                raise ValueError(f"privacy 'clipped' requires one of the backends {', '.join(PRIVATE_BACKENDS)}")
            optimizer_is_set = "optimizer" in self.model_fields_set and self.optimizer != "sgd"
            if self.estimator == "directional" and optimizer_is_set:
                raise ValueError(
                    f"estimator 'directional' has no optimizer {self.optimizer!r} with privacy 'clipped', because the "
                    "noised projections are the update; omit optimizer, or use estimator 'gradient'"
                )
        return self

    @model_validator(mode="after")
    def _pairs_of_loss(self) -> Self:
        if self.loss not in PREFERENCE_LOSSES:
            return self
        if self.privacy == "clipped":
            raise ValueError(f"loss {self.loss!r} has no privacy 'clipped'; use loss 'full' on the preferred texts")
        if self.effective_batch % 2 or (self.micro_batch or 0) % 2:
            raise ValueError(f"loss {self.loss!r} takes two rows an example; make effective_batch and micro_batch even")
        return self

    @property
    def rows_per_example(self) -> int:
        """Rows of a step that one example takes: two, side by side, with the losses of preferences."""
        return 2 if self.loss in PREFERENCE_LOSSES else 1

    def requested(self) -> RequestedRecipe:
        """Returns these settings as a job's request states them, the estimator among the fields that are set."""
        return RequestedRecipe.model_validate(self.model_dump(include=set(RequestedRecipe.model_fields)))


class RecipeSettings(RequestedRecipe):
    """Recipe settings with an estimator."""

    queries: int = Field(DEFAULT_QUERIES["replay"], ge=1, le=MAX_QUERIES, description="q: random directions per step")
    estimator: Estimator = Field("replay", description="how a step finds its update")


class Recipe(RecipeSettings):
    """A complete recipe: all settings resolved, and the base model they apply to."""

    format: Literal[1] = 1
    base: BaseRef
    answer_length: int = Field(ge=1, le=512)
    choices: int = Field(ge=1, le=64)
    # Omitted when false, so that the ids of older recipes stay valid.
    kl: bool = Field(
        False,
        exclude_if=lambda kl: not kl,
        description="whether steps add kl_weight x KL(start || adapter) to the loss; from the training settings",
    )

    @property
    def id(self) -> str:
        """The sha256 of the recipe's canonical JSON, 64 hexadecimal digits."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    @property
    def paths(self) -> int:
        """n: the copies of B with which a step runs whole sequences: 2q perturbed ones, or only the current one."""
        return 1 if self.estimator in REVERSE_ESTIMATORS or self.perturbed == "answers" else 2 * self.queries

    @property
    def answer_paths(self) -> int:
        """The copies of B at the positions of the answer: one for each direction where they alone are perturbed."""
        return self.queries if self.perturbed == "answers" else self.paths

    @property
    def keeps_optimizer(self) -> bool:
        """Whether a program's state is B and an optimizer's state, which no trajectory reproduces."""
        if self.estimator == "directional":
            return self.privacy == "none" and self.optimizer != "sgd"
        return self.estimator == "gradient"

    @property
    def noised_scalars(self) -> int | None:
        """The number of scalars of a private step that the host adds noise to; None: the program adds it to D."""
        return None if self.estimator == "gradient" else self.queries

    @property
    def examples_per_step(self) -> int:
        """The number of examples in the E rows of a step."""
        return self.effective_batch // self.rows_per_example

    @property
    def rows(self) -> int:
        """The number of examples that are computed at once: a micro-batch, or all E."""
        return self.micro_batch or self.effective_batch

    @property
    def scale(self) -> float:
        """alpha / r: the factor of x A B."""
        return self.alpha / self.rank

    @property
    def score_rows(self) -> int:
        """R: the number of sequences in one `score` call, as many as a step computes at once."""
        return self.paths * self.rows

    def adapted_layers(self, count: int) -> tuple[int, ...]:
        """Returns the ascending indices of the adapted layers of a base with `count` layers.

        Raises InvalidRecipe if the base lacks one of them.
        """
        return layer_indices(self.layers, count)

    def frozen_layers(self, count: int) -> int:
        """Returns the number of decoder layers below the first adapted one. They run once for all paths."""
        return self.adapted_layers(count)[0]


def directions_at_once(queries: int, size: int, *, looped: bool) -> int:
    """Returns how many of its q directions a program of estimator `directional` draws at once.

    size: D. looped: the program loops over its blocks, and more blocks compile no longer. If q is not a multiple of a
    block, the last directions are drawn after the loop, by a second copy of the generator; a divisor of q needs none.
    """
    most = min(queries, max(1, DIRECTION_BLOCK // size))
    if not looped:
        return max(most, -(-queries // MAX_DIRECTION_BLOCKS))
    divisor = max(count for count in range(1, most + 1) if queries % count == 0)
    return divisor if 2 * divisor > most else most


def layer_indices(layers: Layers, count: int) -> tuple[int, ...]:
    """Returns the ascending layer indices that `layers` selects in a base of `count` layers; last:P% is rounded up.

    Raises InvalidRecipe if the base has too few layers.
    """
    if isinstance(layers, tuple):
        if layers[-1] >= count:
            raise InvalidRecipe(f"layers names layer {layers[-1]}; the base's last one is {count - 1}")
        return layers
    if layers == "all":
        return tuple(range(count))
    match = re.fullmatch(r"last:(\d+)(%?)", layers)
    if match is None:
        raise InvalidRecipe(f"layers is {layers!r}; it must be all, last:K, last:P% or a list")
    number = int(match[1])
    last = math.ceil(count * number / 100) if match[2] else number
    if last > count:
        raise InvalidRecipe(f"layers is {layers!r}; the base has {count} layers")
    return tuple(range(count - last, count))


def resolve_layers(layers: Layers, count: int) -> Layers:
    """Returns the canonical form of `layers` for a base of `count` layers. Equal programs then have equal recipe ids.

    Raises InvalidRecipe if the base has too few layers.
    """
    indices = layer_indices(layers, count)
    if indices == tuple(range(count)):
        return "all"
    if indices == tuple(range(count - len(indices), count)):
        return f"last:{len(indices)}"
    return indices


def trainable_precisions() -> list[Precision]:
    """Returns the precisions that `check_trainable` accepts."""
    return [precision for precision in get_args(Precision) if precision not in UNTRAINABLE]


def check_trainable(precision: Precision) -> None:
    """Raises InvalidRecipe with the measured reason if models in this precision learn too little."""
    if precision in UNTRAINABLE:
        raise InvalidRecipe(f"precision {precision}: {UNTRAINABLE[precision]}; use int4, int8-weight or int8")
