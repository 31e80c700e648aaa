"""The contenders of `bench end-to-end`, one line of `TABLE` each, and their budgets.

Ours are estimators of one job API. The others have the paper's recipe; first order also runs with our settings. If a
contender has a grid, its rate is chosen on the validation split. For the paper's recipes the grid begins at the largest
of the paper's rates: the smaller ones, meant for 20,000 steps, hardly move B in a few dozen.
"""

from dataclasses import dataclass
from typing import Any

from bench.training.learners import Engine
from bench.training.runs import Calibrated, Contender
from shared.recipe import TARGETS, RecipeSettings
from shared.training_settings import TrainingSettings

BATCH = 16  # q E of the paper's experiments
MAX_STEPS = 20_000  # the paper's
SHORT_GRID = (5e-4, 1e-3, 4e-3, 1.6e-2)
FIRST_ORDER_GRID = (1e-2, 3e-2, 1e-1, 3e-1)
OUR_SETTINGS: dict[str, Any] = {"layers": "last:8", "sequence_length": 36, "loss": "candidates"}
OUR_DEEPER_SETTINGS: dict[str, Any] = OUR_SETTINGS | {"layers": "last:12"}


@dataclass(frozen=True)
class Entry:
    """A contender, and how it is run. Without a cap all its steps are run.

    claim: prefix of the names of its claims; None: it has no claims. grid: rates tried on the validation split.
    trial_cap: core-seconds of a trial. cap: core-seconds of a run, which also ends at the target. evaluation_steps:
    further steps after which it is evaluated, besides its evaluation interval. trial_steps: steps of a trial; None: as
    many as a run.
    """

    contender: Contender
    claim: str | None
    grid: tuple[float, ...] = ()
    trial_cap: float | None = None
    cap: float | None = None
    evaluation_steps: tuple[int, ...] = ()
    trial_steps: int | None = None


def program_contender(
    name: str, training: TrainingSettings, calibration: Calibrated | None = None, **recipe: Any
) -> Contender:
    """Returns a contender of one of our estimators, as a program in the agent's runtime."""
    settings = RecipeSettings(**recipe)
    return Contender(name=name, engine="program", recipe=settings, training=training, calibration=calibration)


OURS = program_contender(
    "replay",
    TrainingSettings(steps=400, lr=1e-2, schedule="cosine", eps=2e-2, evaluation_interval=100),
    "balanced",
    perturbed="answers",
    targets=("o_proj", "down_proj"),
    rank=1,
    alpha=8,
    queries=512,
    effective_batch=2,
    precision="int8",
    **OUR_SETTINGS,
)
DIRECTIONAL = program_contender(
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
    **OUR_SETTINGS,
)
GRADIENT_SETTINGS: dict[str, Any] = {
    "estimator": "gradient",
    "targets": TARGETS,
    "rank": 8,
    "effective_batch": 8,
    **OUR_DEEPER_SETTINGS,
}
SHORT_TRAINING = TrainingSettings(steps=80, lr=3e-3, schedule="cosine", evaluation_interval=20)  # 640 examples
# Further steps after which a run is evaluated: accuracy rises most there.
EARLY_STEPS = (4, 6, 8, 10, 12, 15, 30)
LATER_STEPS = (10, 20, 30, 50, 60, 70)


def as_in_the_paper(name: str, engine: Engine, queries: int) -> Contender:
    """Returns a contender with the paper's recipe: all seven linear layers, r = 16, alpha = 32, full vocabulary."""
    recipe = RecipeSettings(
        targets=TARGETS, queries=queries, effective_batch=BATCH // queries, sequence_length=36, noise="gaussian"
    )
    training = TrainingSettings(steps=MAX_STEPS, evaluation_interval=MAX_STEPS)
    return Contender(name=name, engine=engine, recipe=recipe, training=training)


FIRST_ORDER_SAME_HELP = Contender(
    name="first-order LoRA-FA, same help",
    engine="first-order",
    recipe=RecipeSettings(**GRADIENT_SETTINGS),
    training=SHORT_TRAINING,
)
# As many examples as `replay` has. Also evaluated after a tenth of them: the paper gives zeroth order more steps.
FIRST_ORDER_STEPS = OURS.training.steps * OURS.recipe.effective_batch // BATCH
FIRST_ORDER = as_in_the_paper("first-order LoRA-FA", "first-order", 1).with_training(steps=FIRST_ORDER_STEPS)
# Trials and runs of the other contenders get several times the core-seconds that ours need.
TABLE = (
    Entry(OURS, "", evaluation_steps=(25, 50, 75, 125, 150, 250)),  # its rate: ADR 30
    Entry(
        program_contender("gradient", SHORT_TRAINING, precision="int8", **GRADIENT_SETTINGS),
        "gradient_",
        (3e-3, 5e-3),
        evaluation_steps=EARLY_STEPS,
    ),
    Entry(DIRECTIONAL, "directional_", (3e-3, 4e-3), evaluation_steps=LATER_STEPS),
    Entry(FIRST_ORDER_SAME_HELP, "first_order_same_help_", (3e-3, 5e-3), evaluation_steps=EARLY_STEPS),
    Entry(as_in_the_paper("MobiZO q=4", "program", 4), None, SHORT_GRID, 30.0, 120.0),
    Entry(as_in_the_paper("MobiZO q=16", "program", 16), None, SHORT_GRID, 30.0, 120.0),
    Entry(as_in_the_paper("MeZO LoRA-FA", "mezo-program", 1), None, SHORT_GRID, 60.0, 240.0),
    Entry(
        FIRST_ORDER,
        None,
        FIRST_ORDER_GRID,
        trial_steps=max(1, FIRST_ORDER_STEPS // 3),
        evaluation_steps=tuple(max(1, FIRST_ORDER_STEPS * tenths // 10) for tenths in (1, 2, 3, 4, 6)),
    ),
)
