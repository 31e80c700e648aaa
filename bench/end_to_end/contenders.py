"""The contenders of `bench end-to-end`, one line of `TABLE` each, and how much each is given.

Ours are estimators of one job API. Theirs have the paper's recipe, or, for first order, also the help that ours has. A
rate is chosen on the validation split where a contender has a grid, from the largest of the paper's rates upwards for
the paper's recipes: the smaller ones, for 20,000 steps, hardly move B in a few dozen.
"""

from dataclasses import dataclass
from typing import Any

from bench.training.learners import Engine
from bench.training.runs import Contender
from shared.recipe import TARGETS, RecipeSettings
from shared.training_settings import TrainingSettings
from shared.zo.calibration import Kind

BATCH = 16  # q E of the paper's experiments
MOST_STEPS = 20_000  # the paper's
SHORT_GRID = (5e-4, 1e-3, 4e-3, 1.6e-2)
FIRST_ORDER_GRID = (1e-2, 3e-2, 1e-1, 3e-1)
HELPED: dict[str, Any] = {"layers": "last:8", "sequence_length": 36, "loss": "candidates"}
DEEPER: dict[str, Any] = HELPED | {"layers": "last:12"}


@dataclass(frozen=True)
class Entry:
    """A contender, and how it is run. Without a cap all its steps are run.

    claim: what the names of its own claims begin with; None: it has none. grid: rates tried on the validation split.
    trial: core-seconds of a try. cap: core-seconds of a run, which then ends at the target. looks: steps after which it
    is measured, besides its evaluation interval. trial_steps: steps of a try, if they are not the run's.
    """

    contender: Contender
    claim: str | None
    grid: tuple[float, ...] = ()
    trial: float | None = None
    cap: float | None = None
    looks: tuple[int, ...] = ()
    trial_steps: int | None = None


def ours(name: str, training: TrainingSettings, calibration: Kind | None = None, **recipe: Any) -> Contender:
    """Returns a contender of one of our estimators, as a program in the agent's runtime."""
    settings = RecipeSettings(**recipe)
    return Contender(name=name, engine="program", recipe=settings, training=training, calibration=calibration)


OURS = ours(
    "replay",
    TrainingSettings(steps=200, lr=5e-3, schedule="cosine", eps=2e-2, evaluation_interval=50),
    "gradients",
    targets=("v_proj", "o_proj"),
    rank=1,
    alpha=8,
    queries=8,
    effective_batch=2,
    precision="int8",
    **HELPED,
)
DIRECTIONAL = ours(
    "directional",
    TrainingSettings(steps=160, lr=3e-3, schedule="cosine", evaluation_interval=40),
    "gradients",
    estimator="directional",
    optimizer="adam",
    targets=("v_proj", "o_proj", "down_proj"),
    rank=1,
    alpha=8,
    queries=512,
    effective_batch=8,
    precision="int8",
    **HELPED,
)
EXACT: dict[str, Any] = {"estimator": "gradient", "targets": TARGETS, "rank": 8, "effective_batch": 8, **DEEPER}
SHORT = TrainingSettings(steps=80, lr=3e-3, schedule="cosine", evaluation_interval=20)  # 640 examples
# Steps after which a run is measured too: most of the rise is there.
EARLY = (4, 6, 8, 10, 12, 15, 30)
LATER = (10, 20, 30, 50, 60, 70)


def as_in_the_paper(name: str, engine: Engine, queries: int) -> Contender:
    """Returns a contender with the paper's recipe: all seven linear layers, r = 16, alpha = 32, full vocabulary."""
    recipe = RecipeSettings(
        targets=TARGETS, queries=queries, effective_batch=BATCH // queries, sequence_length=36, noise="gaussian"
    )
    training = TrainingSettings(steps=MOST_STEPS, evaluation_interval=MOST_STEPS)
    return Contender(name=name, engine=engine, recipe=recipe, training=training)


HELPED_FIRST_ORDER = Contender(
    name="first-order LoRA-FA, same help", engine="first-order", recipe=RecipeSettings(**EXACT), training=SHORT
)
# As many examples as replay has; also measured after a tenth of them, since the paper gives zeroth order more steps.
FIRST_ORDER_STEPS = OURS.training.steps * OURS.recipe.effective_batch // BATCH
FIRST_ORDER = as_in_the_paper("first-order LoRA-FA", "first-order", 1).at(steps=FIRST_ORDER_STEPS)
# Core-seconds of a try and of a run of theirs: several times what ours needs.
TABLE = (
    Entry(OURS, "", (5e-3, 7e-3), looks=(25, 75, 125, 175)),
    Entry(ours("gradient", SHORT, precision="int8", **EXACT), "gradient_", (3e-3, 5e-3), looks=EARLY),
    Entry(DIRECTIONAL, "directional_", (3e-3, 4e-3), looks=LATER),
    Entry(HELPED_FIRST_ORDER, "first_order_same_help_", (3e-3, 5e-3), looks=EARLY),
    Entry(as_in_the_paper("MobiZO q=4", "program", 4), None, SHORT_GRID, 30.0, 120.0),
    Entry(as_in_the_paper("MobiZO q=16", "program", 16), None, SHORT_GRID, 30.0, 120.0),
    Entry(as_in_the_paper("MeZO LoRA-FA", "mezo-program", 1), None, SHORT_GRID, 60.0, 240.0),
    Entry(
        FIRST_ORDER,
        None,
        FIRST_ORDER_GRID,
        trial_steps=max(1, FIRST_ORDER_STEPS // 3),
        looks=(max(1, FIRST_ORDER_STEPS // 10),),
    ),
)
