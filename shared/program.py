"""The interface of a compiled program: its methods, their inputs and outputs, and the signed manifest of its files.

Methods (n = 2q paths, or 1 with estimators `gradient` and `directional`; path p < q is B + eps z_p, path q + p is
B - eps z_p; integers are TOKEN_DTYPE, scalars [1]).
S is any length from MIN_LENGTH to the recipe's if the manifest has `dynamic_length`, otherwise the recipe's
(`shared.program_inputs` has both constants):

    step     full:       tokens (E,S), positions (E,T), answers (E,T), mask (E,T), seeds (q,2), lr, eps
             candidates: tokens (E,S), positions (E,T), choices (E,T,C), choice_mask (E,T,C), mask (E,T), seeds, lr, eps
             -> losses (2q,): loss_plus (q,), then loss_minus (q,), token means (shared.zo.encoding);
                coefficients (q,). The call has updated B: B -= coefficients_i z_i, in order
             With privacy `clipped` both also take clip [1] and carried (q,), the secret noise in whole units of
             clip / UNITS (shared.privacy). They return the totals (q,) in these units instead of the losses: carried
             plus each example's clipped loss differences, or with `directional` the clipped projections of its
             gradient. A row whose mask is all 0 contributes exactly zero.
             Losses dpo and kto take reference (E,), weights (E,) and beta [1] after the mask of loss full; rows 2i and
             2i + 1 are one example (`shared.zo.packing.pack_preferences`), and losses are means over examples
             With `kl` of the recipe, both losses take kl_weight and start (D,) after the mask, and the step follows
             the gradient of loss + kl_weight KL(p_start || p_B), means over answer tokens; p_start: at B = start. The
             loss that it returns is without the divergence
    replay   seeds (q,2), coefficients (q,) -> first element of B (1,); the update of `step` without its forward passes
    score    tokens (R,S), positions (R,T), choices (R,T,C) -> log-probabilities (R,T,C) over the whole vocabulary
    adapter  -> B (D,)
    load     B (D,) -> first element of B (1,)

If the recipe does not adapt the lowest layers, `step` equals `prefix` followed by `suffix`, bit for bit:

    prefix   tokens (E,S) -> hidden (E,S,hidden): the state before the first adapted layer, independent of B
    suffix   as `step`, with hidden (E,S,hidden) in place of tokens
    score_suffix  as `score`, with hidden (R,S,hidden) in place of tokens; programs of earlier compilers lack it

With estimator `stored` (the paper's Algorithm 2) a step's update is applied by the next step. `adapter` and `score`
use the updated B; `replay` takes eps after its coefficients, since the stored copies depend on it; and there is

    flush    -> first element of B (1,); applies the pending update of the last step

With estimator `directional` (an optimizer's direction u from the exact gradient, projected on the directions) `step`
and `suffix` take the same inputs, but do not depend on eps, and return one loss:

             -> loss [1], the mean over answer tokens before the step; coefficients (q,), c_i = <u, z_i> lr / q. The
                call has updated B: B -= c_i z_i, in order

With optimizer `sgd`, and with privacy, u is the gradient itself. With another one the program also has `state` and
`restore` as below, and `replay` moves B alone.

With estimator `gradient` a step has no directions, and the program has no `replay`. The state is one vector (M,): B,
followed by the optimizer's moments. `load` resets the moments to zero:

    step     full:       tokens (E,S), positions (E,T), answers (E,T), mask (E,T), lr, max_norm, weight_decay
             candidates: tokens (E,S), positions (E,T), choices (E,T,C), choice_mask (E,T,C), mask (E,T), lr, max_norm,
                         weight_decay
             -> loss [1], the mean over answer tokens before the step, and the L2 norm [1] of its gradient before
             clipping to max_norm (infinity: no clipping); weight_decay is decoupled from the gradient
             With privacy `clipped` both also take clip [1], sigma [1], last [1], keys int32 (NOISE_KEYS,2) and carried
             int32 (D,). They return the totals, int32 (D,) in units of sigma clip / NOISE_UNITS, instead of the loss:
             carried plus each example's clipped gradient. With last 1 the totals include noise drawn from the secret
             keys, and B moves by totals / E; with last 0 the state does not change. The norm is that of totals / E
    suffix   as `step`, with hidden (E,S,hidden) in place of tokens
    state    -> the state (M,)
    restore  state (M,) -> first element of B (1,)

The inference file (role `inference`, where the backend has one) holds one sequence's key-value cache of the manifest's
`inference_context` C tokens, and its own B (D,), whatever the estimator. `load` comes before the first `extend`:

    extend   tokens (1,L), start [1], picks (P,) -> logits (P,V) at rows `picks` of these L tokens, which are
             stored in the cache from `start` on and attend to all earlier tokens; 1 <= L <= S, 1 <= P <= T
    adapter  -> B (D,)
    load     B (D,) -> first element of B (1,); ends the text in the cache, which depends on B: the next starts at 0
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from shared.canonical import canonical_json
from shared.chat_template import ChatTemplate
from shared.recipe import REVERSE_ESTIMATORS, Precision, Recipe, Sha256, Target
from shared.strict_model import StrictModel
from shared.zo.lora import BaseShape

METHODS = ("step", "replay", "score", "adapter", "load")  # of every program; `randn` noise has no replay
FEW_ANSWERS = 4  # an answer is a small part of a sequence if it has at most a quarter of its positions
WIDE_PRODUCTS: tuple[Target, ...] = ("q_proj", "gate_proj", "up_proj")  # that a reverse pass may compute again
KEPT_PRODUCTS_BYTES = 64_000_000  # that a step may keep of them
# Of an element of a decoder layer's linear weight, where it is not 1: int4 has a scale and an offset for 32 of them.
WEIGHT_BYTES: dict[Precision, float] = {"fp32": 4, "int4": 19 / 32}
MAX_LOGITS = 1 << 21  # elements of logits over the vocabulary that a program holds at once: 8 MiB

Role = Literal["program", "weights", "tokenizer", "inference"]


class ProgramFile(StrictModel):
    """One file of a program, identified by its sha256."""

    role: Role
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="a plain file name, no directories")
    size: int = Field(ge=0)
    sha256: Sha256


class ProgramManifest(StrictModel):
    """The description of a program, which a device verifies before running it."""

    format: Literal[1] = 1
    version: int = Field(1, ge=1, description="increases with each program of a recipe; devices reject a lower one")
    recipe: Recipe
    recipe_id: Sha256
    shape: BaseShape
    size: int = Field(ge=1, description="D: elements of flat B")
    a_sha256: Sha256
    score_rows: int = Field(ge=1, description="R")
    methods: tuple[str, ...] = METHODS
    dynamic_length: bool = Field(False, description="whether sequences may be shorter than the recipe's")
    inference_context: int | None = Field(None, ge=1, description="C: tokens the inference file holds; null: no file")
    files: tuple[ProgramFile, ...]
    planned_bytes: int = Field(ge=0, description="activation memory the runtime plans, all methods, bytes")
    flops_per_step: int = Field(ge=0)
    delegates: int = Field(ge=0)
    nodes: int = Field(ge=0)
    executorch: str
    # Omitted when null, so that manifests signed before this field existed keep their bytes.
    end_of_text: int | None = Field(
        None,
        ge=0,
        exclude_if=lambda token: token is None,
        description="the base's token that ends a text; null: its files name none",
    )
    stop_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), exclude_if=lambda tokens: not tokens, description="all tokens that end a text, if they are several"
    )
    chat_template: ChatTemplate | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="the base model's own; null: it has none, or the program is older than this field",
    )

    @field_validator("files")
    @classmethod
    def _check_roles(cls, files: tuple[ProgramFile, ...]) -> tuple[ProgramFile, ...]:
        if sorted(file.role for file in files if file.role != "inference") != ["program", "tokenizer", "weights"]:
            raise ValueError("a program has exactly one program, one weights and one tokenizer file")
        if sum(file.role == "inference" for file in files) > 1:
            raise ValueError("a program has at most one inference file")
        if len({file.name for file in files}) != len(files):
            raise ValueError("two files share a name")
        return files

    def file(self, role: Role) -> ProgramFile:
        """Returns the file with this role."""
        return next(file for file in self.files if file.role == role)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.stop_tokens or (() if self.end_of_text is None else (self.end_of_text,))

    @property
    def training_bytes(self) -> int:
        """The memory that training takes, in bytes: weights, what the runtime plans, and weights packed transposed."""
        return self.file("weights").size + self.planned_bytes + transposed_bytes(self.recipe, self.shape)

    @property
    def training_files(self) -> tuple[ProgramFile, ...]:
        """The files needed for training."""
        return tuple(file for file in self.files if file.role != "inference")

    def canonical(self) -> bytes:
        """Returns the bytes that are signed."""
        return canonical_json(self.model_dump(mode="json"))


def logits_part(positions: int, vocabulary: int) -> int:
    """Returns for how many of `positions` a program computes logits over the vocabulary at once.

    The fewest parts whose logits have at most MAX_LOGITS elements, so that memory does not grow with the number of
    answer tokens. All parts have this size; the last one overlaps the part before it.
    """
    parts = -(-positions // max(MAX_LOGITS // vocabulary, 1))
    return -(-positions // parts)


def lowers_softmax(recipe: Recipe, positions: int, vocabulary: int) -> bool:
    """Returns whether XNNPACK computes the loss over the vocabulary, softmax included, of an answer's `positions`.

    Otherwise it computes the logits alone, and nothing over a float32 table: a loss over candidates needs few logits.
    """
    several_parts = logits_part(positions, vocabulary) < positions
    return recipe.backend == "xnnpack" and recipe.loss != "candidates" and (several_parts or recipe.precision == "fp32")


def last_layer_picks(recipe: Recipe) -> int:
    """Returns T where a program computes the base's last layer at the answer's positions alone; 0: at all.

    No other position of that layer has a gradient or is read; its keys and values are still those of all positions.
    Only with exact gradients, and where the answer is a small part of a sequence. Private steps compute all positions:
    an example's gradient must not depend on the others, and the rounding of small products depends on a row's place.
    """
    if recipe.estimator not in REVERSE_ESTIMATORS or recipe.privacy == "clipped":
        return 0
    return recipe.answer_length if FEW_ANSWERS * recipe.answer_length <= recipe.sequence_length else 0


def kept_products(recipe: Recipe, shape: BaseShape) -> tuple[Target, ...]:
    """Returns those of WIDE_PRODUCTS that a step keeps for its reverse passes, instead of computing them again.

    All of them, where they take at most KEPT_PRODUCTS_BYTES together; micro-batches make them smaller.
    """
    if recipe.estimator not in REVERSE_ESTIMATORS:
        return ()
    targets = tuple(target for target in shape.linears if target in WIDE_PRODUCTS)
    kinds = shape.of_layers(recipe.frozen_layers(shape.layers))
    width = sum(kind.features(target)[1] for kind in kinds for target in targets)
    return targets if 4 * recipe.rows * recipe.sequence_length * width <= KEPT_PRODUCTS_BYTES else ()


def transposed_bytes(recipe: Recipe, shape: BaseShape) -> int:
    """Returns the bytes of the linear weights that XNNPACK packs a second time, transposed, for a reverse pass.

    The other backends multiply by the weights as they are stored.
    """
    if recipe.estimator not in REVERSE_ESTIMATORS or recipe.backend != "xnnpack":
        return 0
    elements = sum(shape.layer_weights[recipe.frozen_layers(shape.layers) :])
    layers = round(elements * WEIGHT_BYTES.get(recipe.precision, 1))
    table = 0 if recipe.loss == "candidates" else shape.vocabulary * shape.hidden
    return layers + table * (4 if recipe.precision == "fp32" else 1)


class SignedManifest(StrictModel):
    """A manifest and the server's Ed25519 signature over its canonical JSON."""

    manifest: ProgramManifest
    key_id: str
    signature: str = Field(description="Ed25519, base64")
