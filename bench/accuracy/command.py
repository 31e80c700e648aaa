"""`bench accuracy`: accuracy of each training method at the same budget, as in the paper's accuracy tables.

Zero-shot, first-order SGD, MeZO and MobiZO (q E = 16 throughout) on LoRA-FA; the number of queries; quantized weights;
other adapters. Training runs in PyTorch, on a CPU or GPU, from any base that the compiler reads, on the shipped reviews
or other records of a shipped template. One step of any method is 32 sequences through the network, forward or back, so
that equal steps are equal compute; the number of examples seen differs.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench.accuracy.runs import SHIPPED, Point, Runner, Setting, Sizes, read_data
from bench.baselines.peft_adapters import VARIANTS
from bench.programs import model_file
from bench.result import Claims, Row, notes, write
from bench.runner import Full, JsonFile, Keep, Quick, select_parts
from bench.training.runs import Run
from shared.errors import InvalidRecipe, MobizoError
from shared.precisions import check_precision
from shared.recipe import Precision

PARTS = ("main", "queries", "precision", "variants")  # methods of Parts
ZERO_SHOT, FIRST_ORDER, MEZO = "zero-shot", "FO-SGD (LoRA-FA)", "MeZO (LoRA-FA)"
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-weight", "int4", "int4-weight")


@dataclass(frozen=True)
class Trials:
    """How a method is run. interval: steps between validations. rates, scales: learning rates and eps to try."""

    steps: int
    interval: int
    rates: tuple[float, ...]
    scales: tuple[float, ...] = (1e-2,)


@dataclass(frozen=True)
class Budget:
    """How much is run."""

    sizes: Sizes
    seeds: tuple[int, ...]
    zeroth: Trials
    first_order: Trials
    variants: Trials
    vera_rank: int = 256


SMALL_BUDGET = Budget(Sizes(1000, 16, 48), (0,), Trials(4, 4, (2e-3,)), Trials(4, 4, (3e-2,)), Trials(4, 4, (2e-3,)))
PLAIN_BUDGET = Budget(  # short runs need rates from the upper end of the paper's grid on
    *(Sizes(1000, 100, 200), (0, 1, 2)),
    zeroth=Trials(72, 24, (5e-4, 2e-3, 8e-3)),
    first_order=Trials(72, 24, (1e-2, 3e-2, 1e-1)),
    variants=Trials(72, 24, (5e-4, 2e-3, 8e-3, 3e-2)),
)
PAPER_BUDGET = Budget(  # Table 9 and training procedure
    *(Sizes(1000, 500, 1000), (0, 1, 2)),
    zeroth=Trials(20_000, 500, (5e-4, 1e-4, 5e-5, 1e-5)),
    first_order=Trials(1000, 100, (5e-3, 1e-3, 5e-4)),
    variants=Trials(10_000, 500, (5e-6, 5e-5, 5e-4, 5e-3), (1e-3, 1e-2)),
    vera_rank=1024,
)


class Parts:
    """Runs the parts of the benchmark on one task and collects rows and claims, accuracies in percent."""

    def __init__(self, runner: Runner, budget: Budget) -> None:
        self.runner, self.budget = runner, budget
        self.rows: list[Row] = []
        self.claims: Claims = {}

    def main(self) -> None:
        """Compares all methods at q E = 16 (the paper's Table 1 and Tables 10 to 13)."""
        self._record([self.runner.zero_shot()], ZERO_SHOT)
        self._run_contender(FIRST_ORDER, self.budget.first_order, FIRST_ORDER, "first-order")
        self._run_contender(MEZO, self.budget.zeroth, MEZO, "mezo")
        for queries in (4, 16):
            self._run_mobizo(f"MobiZO q={queries}", queries)

    def queries(self) -> None:
        """Compares numbers of queries at fixed q E (Table 16)."""
        for queries in (1, 2, 4, 8, 16):
            self._run_mobizo(f"q{queries}", queries)

    def precision(self) -> None:
        """Compares frozen weights of fewer bits (Table 14).

        Weights are rounded by the compiler's quantizers and turned back: as in the paper, and unlike in programs of
        int8 and int4, activations are not quantized. The file of the shipped base holds 4-bit weights already, so
        rounding them again may cost less than it would for a float model.
        """
        for precision in PRECISIONS:
            try:
                check_precision(precision, self.runner.shape)
            except InvalidRecipe:  # the layers' inputs do not divide into the precision's groups
                continue
            self._record([self.runner.zero_shot(precision)], None)
            for queries in (4, 16):
                self._run_mobizo(f"MobiZO q={queries} {precision}", queries, precision)

    def variants(self) -> None:
        """Compares adapters from `peft` under MeZO (Table 5)."""
        for variant in VARIANTS:
            rank = self.budget.vera_rank if variant == "vera" else 0
            fields = {"variant": variant, "vera_rank": rank}
            self._run_contender(f"variant {variant}", self.budget.variants, variant, "mezo", **fields)

    def _run_mobizo(self, claim: str, queries: int, precision: Precision = "fp32") -> None:
        fields = {"queries": queries, "precision": precision}
        self._run_contender(claim, self.budget.zeroth, f"MobiZO q={queries}", "mobizo", **fields)

    def _run_contender(self, claim: str, trials: Trials, name: str, engine: str, **fields: Any) -> None:
        contender = self.runner.setting.contender(name, engine, trials.steps, trials.interval, **fields)
        grid = [Point(lr, eps) for eps in trials.scales for lr in trials.rates]
        _, runs, grid_runs = self.runner.best_point(contender, grid, self.budget.seeds)
        self._record(grid_runs, None)
        self._record(runs, claim)

    def _record(self, runs: Sequence[Run], claim: str | None) -> None:
        """Adds a row for each new run, and the claims of their means; parts share runs."""
        for run in runs:
            row = run.model_dump(mode="json")
            if row not in self.rows:
                self.rows.append(row)
        if claim is not None:
            key = f"{self.runner.data.name} {claim}".lower().translate(str.maketrans(" -", "__", "=()"))
            self.claims[f"accuracy_{key}"] = 100 * statistics.mean(run.best or 0.0 for run in runs)
            self.claims[f"final_accuracy_{key}"] = 100 * statistics.mean(run.final or 0.0 for run in runs)


def accuracy(
    json_file: JsonFile = None,
    quick: Quick = False,
    full: Full = False,
    keep: Keep = None,
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}, or all; default: main.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="movies, products or a shipped template; default: movies.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of the task's train.jsonl and test.jsonl.")] = None,
    base: Annotated[str | None, typer.Option(help="Model directory, .gguf file or id; default: SmolLM2-135M.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="The device of PyTorch.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], typer.Option(help="Type of frozen weights and activations.")
    ] = "float32",
    sequence_length: Annotated[int, typer.Option("--seq-len", min=8, help="Longer prompts lose their front.")] = 256,
) -> None:
    """Train and test every method on equal budgets: accuracy and its spread."""
    if quick and full:
        raise typer.BadParameter("choose --quick or --full")
    if data is not None and not task:
        raise typer.BadParameter("--data needs --task")
    part_names = ["all"] if full and not part else part or ["main"]
    selected = select_parts(dict.fromkeys(PARTS), None if "all" in part_names else part_names)
    budget = SMALL_BUDGET if quick else PAPER_BUDGET if full else PLAIN_BUDGET
    setting = Setting(
        base=base or str(model_file()),
        device=device,
        dtype=dtype,
        sequence_length=sequence_length,
        noise="gaussian" if full else "rademacher",
    )
    rows: list[Row] = []
    claims: Claims = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in task or (list(SHIPPED) if full else ["movies"]):
            try:
                records = read_data(name, data, budget.sizes)
                parts = Parts(Runner(setting, records, keep or Path(directory)), budget)
            except MobizoError as error:
                raise SystemExit(error.detail) from error
            for selected_part in selected:
                notes.print(f"{name}: {selected_part}")
                getattr(parts, selected_part)()
            rows += parts.rows
            claims |= parts.claims
    write(json_file, rows, claims)
