"""What `bench accuracy` compares, part by part, and the tables that its runs fill, the paper's figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import paper_accuracy as paper
from bench.accuracy_data import Sizes
from bench.accuracy_runs import BATCH, Contender, Outcome, Point, Runner
from bench.baselines.variants import VARIANTS
from bench.result import Cell, Plot, Row, Table
from server.compiler.quantization import check_precision
from shared.errors import InvalidRecipe
from shared.recipe import Precision

WEIGHTS: Mapping[Precision, str] = {  # the rows of the precision table, and the paper's rows they stand beside
    "fp32": "",
    "int8-weight": "8 bits",
    "int4": "4 bits",
    "int4-weight": "4 bits",
}
IN_WORDS: Mapping[Precision, str] = {
    "fp32": "as loaded",
    "int8-weight": "8 bits, a scale a row",
    "int4": "4 bits, a scale for 32",
    "int4-weight": "4 bits, a scale a row",
}


@dataclass(frozen=True)
class Budget:
    """How much is run. Grids: learning rates of first order and of zeroth order."""

    sizes: Sizes
    seeds: tuple[int, ...]
    steps: int
    interval: int
    steps_first_order: int
    interval_first_order: int
    steps_variants: int
    grid: tuple[float, ...]
    grid_first_order: tuple[float, ...]
    grid_variants: tuple[float, ...]
    eps_variants: tuple[float, ...]
    vera_rank: int

    def contender(self, name: str, **settings: Any) -> Contender:
        """A zeroth-order one."""
        grid = tuple(map(Point, self.grid))
        return Contender(name, steps=self.steps, interval=self.interval, grid=grid, **settings)

    def mobizo(self, queries: int, precision: Precision = "fp32") -> Contender:
        """MobiZO of q E = 16."""
        return self.contender(f"MobiZO q={queries}", method="mobizo", queries=queries, precision=precision)


PLAIN = Budget(
    sizes=Sizes(1000, 100, 200),
    seeds=(0, 1, 2),
    steps=72,
    interval=24,
    steps_first_order=72,
    interval_first_order=24,
    steps_variants=72,
    # The paper's end where short runs begin.
    grid=(5e-4, 2e-3, 8e-3),
    grid_first_order=(1e-2, 3e-2, 1e-1),
    grid_variants=(5e-4, 2e-3, 8e-3, 3e-2),
    eps_variants=(1e-2,),
    vera_rank=256,
)
QUICK = replace(
    PLAIN,
    sizes=Sizes(1000, 16, 48),
    seeds=(0,),
    steps=4,
    interval=4,
    steps_first_order=4,
    interval_first_order=4,
    steps_variants=4,
    grid=(2e-3,),
    grid_first_order=(3e-2,),
    grid_variants=(2e-3,),
)
FULL = Budget(
    sizes=Sizes(paper.TRAIN, paper.VALIDATION, paper.TEST),
    seeds=tuple(range(paper.SEEDS)),
    steps=paper.STEPS,
    interval=paper.INTERVAL,
    steps_first_order=paper.STEPS_FO,
    interval_first_order=paper.INTERVAL_FO,
    steps_variants=paper.STEPS_VARIANTS,
    grid=paper.GRID,
    grid_first_order=paper.GRID_FO,
    grid_variants=paper.GRID_VARIANTS,
    eps_variants=paper.EPS_VARIANTS,
    vera_rank=paper.VERA_RANK,
)


@dataclass
class Found:
    """What parts add to."""

    rows: list[Row] = field(default_factory=list)
    claims: dict[str, float] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A contender's runs: of its best learning rate by seed, and the first seed's of the whole grid."""

    contender: Contender
    point: Point
    outcomes: Sequence[Outcome]
    grid: Sequence[Outcome]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What was trained and how well: for HEAD's columns."""
        best = [100 * outcome.best for outcome in self.outcomes]
        final = [100 * outcome.final for outcome in self.outcomes]
        contender = self.contender
        return (
            *((self.point.lr, self.point.eps) if contender.grid else (None, None)),
            contender.steps,
            contender.examples,
            contender.passes,
            *(cell for accuracies in (best, final) for cell in (statistics.mean(accuracies), spread(accuracies))),
        )


HEAD = ("learning rate", "eps", "steps", "examples seen", "passes", "best %", "± best", "final %", "± final")


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample; of one value there is none."""
    return statistics.stdev(values) if len(values) > 1 else None


class Parts:
    """The parts of the benchmark on one task."""

    def __init__(self, runner: Runner, budget: Budget, found: Found, remark: str) -> None:
        """remark: what every table's notes say of the run."""
        self.runner, self.budget, self.found, self.remark = runner, budget, found, remark
        self.task, self.base = runner.data.name, runner.base_name
        self._recorded: set[str] = set()

    def main(self) -> None:
        """Table 1 (and 10 to 13): all methods, q E = 16."""
        budget = self.budget
        first_order = Contender(
            paper.FO,
            "first-order",
            grid=tuple(map(Point, budget.grid_first_order)),
            steps=budget.steps_first_order,
            interval=budget.interval_first_order,
        )
        zero = Entry(Contender(paper.ZERO, "none"), Point(0), [self.runner.zero_shot()], ())
        contenders = (first_order, budget.contender(paper.MEZO, method="mezo"), budget.mobizo(4), budget.mobizo(16))
        entries = [zero, *map(self._contend, contenders)]
        rows = []
        for entry in entries:
            cited = paper.nearest(self.base, self.task, entry.contender.name)
            asked = {paper.ZERO: 0, paper.FO: paper.STEPS_FO}.get(entry.contender.name, paper.STEPS)
            why = self._difference(cited.model, cited.task, entry.contender.steps, asked)
            rows.append((entry.contender.name, *entry.cells, cited.percent, why))
            self._claim(entry, entry.contender.name)
        head = ("method", *HEAD, "paper's %", "setting")
        title = f"{self.task}: accuracy by method, q E = {BATCH} (the paper's Table 1 and Tables 10 to 13)"
        self._table("main", title, head, rows)
        self._grids("main", entries)
        self._curves(entries)

    def queries(self) -> None:
        """Table 16: q at fixed q E."""
        entries = [self._contend(self.budget.mobizo(queries)) for queries in (1, 2, 4, 8, 16)]
        rows = []
        for entry in entries:
            queries = entry.contender.queries
            cited = [figures[queries] for figures in paper.QUERIES.values()]
            rows.append((queries, BATCH // queries, *entry.cells, *cited))
            self._claim(entry, f"q{queries}")
        head = ("q", "E", *HEAD, *(f"paper's %, {model}" for model in paper.QUERIES))
        title = f"{self.task}: accuracy by number of queries, q E = {BATCH} (the paper's Table 16)"
        self._table("queries", title, head, rows, "The paper's figures are means over all of a model's tasks.")
        self._grids("queries", entries)
        points = tuple((float(entry.contender.queries), _best(entry)) for entry in entries)
        self.found.plots.append(
            Plot(
                name=f"accuracy-queries-{self.task}",
                title=f"{self.task}: test accuracy by number of queries, q E = {BATCH}",
                x="q",
                y="best accuracy, %",
                series={self.base: points} | {f"paper, {m}": tuple(f.items()) for m, f in paper.QUERIES.items()},
                log_x=True,
            )
        )

    def precision(self) -> None:
        """Table 14: frozen weights of fewer bits."""
        rows, entries = [], []
        for precision, bits in WEIGHTS.items():
            if not _holds(self.runner, precision):
                continue
            zero = self.runner.zero_shot(precision)
            for queries in (4, 16):
                entry = self._contend(self.budget.mobizo(queries, precision))
                name = entry.contender.name
                task = self.task if self.task in paper.GLUE else paper.SENTIMENT
                figures = paper.QUANTIZED[bits] if bits else paper.TINYLLAMA
                why = self._difference("TinyLlama-1.1B", task, entry.contender.steps, paper.STEPS)
                if bits == "4 bits":
                    why = f"{why.removeprefix('same')}; NF4".removeprefix("; ")
                words = IN_WORDS[precision]
                rows.append((words, name, 100 * zero.best, *entry.cells, figures[name][task], why))
                entries.append(entry)
                self._claim(entry, f"{name} {precision}")
        head = ("frozen weights", "method", "zero-shot %", *HEAD, "paper's % (TinyLlama-1.1B)", "setting")
        note = (
            "Weights are rounded by the compiler's own quantizers and turned back before PyTorch multiplies: "
            "activations are not quantized, as in the paper and unlike in programs of int8 and int4. The file of the "
            "shipped base holds 4-bit weights already: rounding them again may cost less than it would of a float "
            "model's."
        )
        title = f"{self.task}: accuracy with quantized frozen weights (the paper's Table 14)"
        self._table("precision", title, head, rows, note)
        self._grids("precision", entries, {entry.contender.precision for entry in entries})

    def variants(self) -> None:
        """Table 5: other adapters, trained by MeZO."""
        budget, entries, rows = self.budget, [], []
        grid = tuple(Point(lr, eps) for eps in budget.eps_variants for lr in budget.grid_variants)
        for variant in VARIANTS:
            contender = Contender(
                variant,
                "mezo",
                grid=grid,
                steps=budget.steps_variants,
                interval=budget.interval,
                variant=variant,
                vera_rank=budget.vera_rank if variant == "vera" else 0,
            )
            entry = self._contend(contender)
            entries.append(entry)
            task = paper.SENTIMENT if self.task not in paper.GLUE + paper.LARGE else self.task
            cited = paper.VARIANTS[variant] if task == paper.SENTIMENT else None
            why = self._difference("OPT-1.3B", paper.SENTIMENT, contender.steps, paper.STEPS_VARIANTS)
            rows.append((variant, self.runner.trained(contender), *entry.cells, cited, why))
            self._claim(entry, f"variant {variant}")
        head = ("adapter", "numbers trained", *HEAD, "paper's % (OPT-1.3B, SST-2)", "setting")
        note = f"The adapters are peft's own; rank 16, VeRA's {budget.vera_rank} (the paper's {paper.VERA_RANK:,})."
        title = f"{self.task}: accuracy by adapter under MeZO, batch {BATCH} (the paper's Table 5)"
        self._table("variants", title, head, rows, note)
        self._grids("variants", entries)

    def _contend(self, contender: Contender) -> Entry:
        entry = Entry(contender, *self.runner.chosen(contender, self.budget.seeds))
        for outcome in (*entry.grid, *entry.outcomes):
            row = outcome.model_dump(mode="json") | {"precision": contender.precision}
            if (key := str(row)) not in self._recorded:  # parts share runs
                self._recorded.add(key)
                self.found.rows.append(row)
        return entry

    def _claim(self, entry: Entry, name: str) -> None:
        key = "_".join(f"{self.task} {name}".lower().replace("=", "").replace("(", "").replace(")", "").split())
        key = key.replace("-", "_")
        self.found.claims[f"accuracy_{key}"] = _best(entry)
        self.found.claims[f"final_accuracy_{key}"] = 100 * statistics.mean(outcome.final for outcome in entry.outcomes)

    def _difference(self, model: str, task: str, steps: int, asked: int) -> str:
        """In what the paper's figure was got otherwise."""
        others = [model] if paper.same_model(self.base) != model else []
        others += [task.upper()] if task != self.task else []
        others += [f"{asked:,} steps"] if steps != asked else []
        return f"there: {', '.join(others)}" if others else "same"

    def _table(
        self, name: str, title: str, head: tuple[str, ...], rows: Sequence[tuple[Cell, ...]], *note: str
    ) -> None:
        budget = self.budget
        sizes = (len(split or ()) for split in (self.runner.splits.train, *self.runner.held_out))
        notes = (
            *note,
            self.remark,
            f"Base {self.base}; {'{:,} examples to train on, {:,} to choose by, {:,} to report on'.format(*sizes)}; "
            f"{len(budget.seeds)} seed{'s' * (len(budget.seeds) > 1)}, mean and sample standard deviation.",
            "Best: test accuracy of what was best on the validation split, measured every "
            f"{budget.interval} steps (first order: {budget.interval_first_order}), the base alone included; final: "
            "after the last step. The paper measures on the test set as it goes and does not say which figure it "
            "prints. Passes: sequences that go through the network, forward or back; examples seen: repeated ones "
            "counted again.",
        )
        found = Table(
            name=f"{name}-{self.task}",
            title=title,
            columns=head,
            rows=tuple(tuple(_rounded(cell) for cell in row) for row in rows),
            notes=" ".join(part for part in notes if part),
        )
        self.found.tables.append(found)

    def _grids(self, part: str, entries: Sequence[Entry], precisions: set[Precision] | None = None) -> None:
        """What was tried to choose learning rates."""
        rows: list[tuple[Cell, ...]] = []
        for entry in entries:
            for outcome in entry.grid:
                chosen = (outcome.lr, outcome.eps) == (entry.point.lr, entry.point.eps)
                name = (
                    f"{outcome.contender}, {IN_WORDS[entry.contender.precision]}" if precisions else outcome.contender
                )
                state = "diverged" if outcome.diverged else "chosen" if chosen else ""
                accuracy, loss = outcome.chosen_by
                rows.append((name, outcome.lr, outcome.eps, 100 * accuracy, -loss, outcome.best_step, state))
        self.found.tables.append(
            Table(
                name=f"{part}-grid-{self.task}",
                title=f"{self.task}: learning rates tried, {part}",
                columns=("method", "learning rate", "eps", "best validation %", "its loss, nats", "after steps", ""),
                rows=tuple(tuple(_rounded(cell) for cell in row) for row in rows),
                notes=f"Seed {self.budget.seeds[0]}, validation split. {self.remark}".strip(),
            )
        )

    def _curves(self, entries: Sequence[Entry]) -> None:
        series = {}
        for entry in entries:
            if entry.contender.steps:
                by_step: dict[int, list[float]] = {}
                for outcome in entry.outcomes:
                    for step, accuracy, _ in outcome.validation:
                        by_step.setdefault(step, []).append(100 * accuracy)
                series[entry.contender.name] = tuple((float(s), statistics.mean(a)) for s, a in by_step.items())
        self.found.plots.append(
            Plot(
                name=f"accuracy-steps-{self.task}",
                title=f"{self.task}: validation accuracy while training, mean over seeds",
                x="steps",
                y="accuracy, %",
                series=series,
            )
        )


def _holds(runner: Runner, precision: Precision) -> bool:
    """Whether the base's layers have as many inputs as the precision's groups take."""
    try:
        check_precision(precision, runner.shape)
    except InvalidRecipe:
        return False
    return True


def _best(entry: Entry) -> float:
    return 100 * statistics.mean(outcome.best for outcome in entry.outcomes)


def _rounded(cell: Cell) -> Cell:
    """Percentages to a hundredth; learning rates are far smaller and stay."""
    return round(cell, 2) if isinstance(cell, float) and abs(cell) >= 1 else cell
