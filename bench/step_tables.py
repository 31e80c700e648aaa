"""The grid's rows as tables: all of them with their floors, and the paper's layouts with its figures beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import paper_tables as paper
from bench.cells import Cell, CellPrecision, Contender, Device, Engine
from bench.result import Cell as Shown
from bench.result import Plot, Table
from bench.step_cells import BATCHES, LENGTHS
from shared.lora import BaseShape
from shared.recipe import BaseRef

Row = dict[str, Any]
NEAREST = "TinyLlama-1.1B"  # of the paper's models, the one nearest ours in size
OURS_DIFFERS = "different: {model}, {machine}, loss over two candidates"
SAME_SEQUENCES = "qE = batch; every sequence of exactly that length; batch B costs 2 B sequences forward."
WIDTHS = tuple(f"S {length}, B {batch}" for length in LENGTHS for batch in BATCHES)


@dataclass(frozen=True)
class Machine:
    """What bounds a step: operations per second of each library's matrix products, bytes per second of reading."""

    torch_flops: float
    xnnpack_flops: float
    read_bytes: float


class Grid:
    """Measured rows, found by what they are of."""

    def __init__(self, rows: Iterable[Row], model: str, device: Device = "cpu") -> None:
        """model: its name, for people."""
        self.rows = list(rows)
        self.model, self.device = model, device
        self._found = {Cell.model_validate({k: row[k] for k in Cell.model_fields}): row for row in self.rows}

    def row(
        self,
        contender: Contender,
        length: int,
        batch: int,
        queries: int = 1,
        engine: Engine = "eager",
        precision: CellPrecision = "fp32",
    ) -> Row:
        """The cell's row; empty where it was not measured. q = 1 is one cell, whichever loop is asked for."""
        if queries == 1:
            same = {Contender.OUTER: Contender.MEZO_LORA_FA, Contender.MOBIZO: Contender.INNER}
            contender = same.get(contender, contender)
        cell = Cell(
            contender=contender,
            engine=engine,
            precision=precision,
            length=length,
            batch=batch,
            queries=queries,
            device=self.device,
        )
        return self._found.get(cell, {})

    def seconds(self, *of: Any, **which: Any) -> float | None:
        """Median seconds of a step."""
        found = self.row(*of, **which)
        return statistics.median(found["seconds"]) if found.get("seconds") else None

    def gigabytes(self, *of: Any, **which: Any) -> float | None:
        """Peak memory: resident, on a GPU its own."""
        found = self.row(*of, **which)
        peak = found.get("peak_gpu_bytes", found.get("peak_rss_bytes"))
        return None if peak is None else peak / 1e9

    def differs(self, why: str) -> str:
        """What sets our rows apart from the paper's."""
        said = OURS_DIFFERS.format(
            model=self.model, machine="GPU" if self.device == "cuda" else "CPU, fp32 unless said"
        )
        return f"{said}; {why}"


def floor_seconds(row: Row, base: BaseRef, shape: BaseShape, machine: Machine) -> float | None:
    """The least that the row's step could take: its products at the library's rate, or its weights read from memory.

    None for quantized products, whose rate was not measured, and for a GPU.
    """
    if row["precision"] != "fp32" or row["device"] != "cpu":
        return None
    cell = Cell.model_validate({name: row[name] for name in Cell.model_fields})
    weights = 4 * shape.layers * sum(int.__mul__(*shape.features(target)) for target in shape.linears)
    rate = machine.xnnpack_flops if cell.engine == "executorch" else machine.torch_flops
    return max(cell.flops(base, shape) / rate, cell.weight_passes() * weights / machine.read_bytes)


def times_floor(row: Row) -> float | None:
    """How many times the floor the step took."""
    return statistics.median(row["seconds"]) / row["floor_seconds"] if row.get("floor_seconds") else None


def tables_of(grid: Grid) -> list[Table]:
    """Every table that at least one measured cell stands in."""
    made = (_all(grid), _memory(grid), _inner(grid), _outer(grid), _quantization(grid), _full(grid), _jetson(grid))
    return [table for table in made if table is not None]


def _all(grid: Grid) -> Table:
    rows = [
        (
            row["who"],
            row["engine"],
            row["precision"],
            row["length"],
            row["batch"],
            statistics.median(row["seconds"]) if row.get("seconds") else None,
            row["peak_rss_bytes"] / 1e9 if "peak_rss_bytes" in row else None,
            row.get("floor_seconds"),
            times_floor(row) if row.get("seconds") else None,
            row.get("skipped", row.get("error")),
        )
        for row in sorted(grid.rows, key=lambda row: (row["length"], row["batch"], row["engine"], row["who"]))
    ]
    return Table(
        name="grid",
        title=f"A step of {grid.model}: seconds and peak memory",
        columns=(
            "who",
            "engine",
            "precision",
            "S",
            "B",
            "s / step",
            "peak GB",
            "floor, s",
            "times floor",
            "not measured",
        ),
        rows=tuple(rows),
        notes=f"{SAME_SEQUENCES} Median of the rounds after the first. Peak: resident memory of the cell's own process "
        "during its steps, the model loaded before, Python and libraries included. Floor: the step's matrix products "
        "at the rate that the same library reaches on one layer's products alone, or its weights once a pass at the "
        "bandwidth of reading, whichever is longer; none for quantized products, whose rate was not measured.",
    )


def _by_width(find: Any, *of: Any, **which: Any) -> list[float | None]:
    return [find(of[0], length, batch, *of[1:], **which) for length in LENGTHS for batch in BATCHES]


def _some(rows: Sequence[tuple[Shown, ...]], first: int, last: int | None = None) -> bool:
    return any(cell is not None for row in rows for cell in row[first:last])


def _memory(grid: Grid) -> Table | None:
    whose = (
        ("FO (full)", Contender.FO_FULL, 1, "eager"),
        ("FO (LoRA-FA)", Contender.FO_LORA_FA, 1, "eager"),
        ("FO (LoRA-FA, checkpointing)", Contender.FO_CHECKPOINTING, 1, "eager"),
        ("MeZO (full)", Contender.MEZO_FULL, 1, "eager"),
        ("MeZO (LoRA-FA)", Contender.MEZO_LORA_FA, 1, "eager"),
        ("MobiZO, q = 1", Contender.MOBIZO, 1, "eager"),
        ("MobiZO, q = 4", Contender.MOBIZO, 4, "eager"),
        ("MobiZO, q = 16", Contender.MOBIZO, 16, "eager"),
        ("MeZO (LoRA-FA)", Contender.MEZO_LORA_FA, 1, "executorch"),
        ("MobiZO, q = 1", Contender.MOBIZO, 1, "executorch"),
        ("MobiZO, q = 4", Contender.MOBIZO, 4, "executorch"),
        ("MobiZO, q = 16", Contender.MOBIZO, 16, "executorch"),
    )
    why = grid.differs("whole process, Python and libraries included")
    rows: list[tuple[Shown, ...]] = [
        (f"{name}, {engine}", *_by_width(grid.gigabytes, contender, q, engine=engine), why)
        for name, contender, q, engine in whose
    ]
    rows = [row for row in rows if _some([row], 1, -1)]
    if not rows:
        return None
    rows += [
        (f"paper: {name}", *(peak for by_batch in found for peak in by_batch), f"{NEAREST} on an A100, 16 bits")
        for name, found in paper.MEMORY[NEAREST].items()
    ]
    return Table(
        name="memory",
        title="Peak memory, GB (the paper's tab:memory)",
        columns=("who", *WIDTHS, "setting"),
        rows=tuple(rows),
        notes=f"{SAME_SEQUENCES} The paper does not say its MobiZO rows' q; its first order is by mixed precision.",
    )


def _ratio(slow: float | None, fast: float | None) -> float | None:
    return None if slow is None or fast is None else slow / fast


def _inner(grid: Grid) -> Table | None:
    rows: list[tuple[Shown, ...]] = []
    why = grid.differs("the paper's is on a GPU in 16 bits")
    for engine in ("eager", "compile", "executorch"):
        mezo = _by_width(grid.seconds, Contender.MEZO_LORA_FA, engine=engine)
        inner = _by_width(grid.seconds, Contender.INNER, engine=engine)
        faster = [_ratio(slow, fast) for slow, fast in zip(mezo, inner, strict=True)]
        rows += [
            (f"MeZO (q = 1, LoRA-FA), {engine}", *mezo, why),
            (f"MobiZO (q = 1, inner), {engine}", *inner, why),
            (f"times faster, {engine}", *faster, why),
        ]
    rows = [row for row in rows if _some([row], 1, -1)]
    if not rows:
        return None
    flat = [[each for by_batch in found for each in by_batch] for found in paper.INNER.values()]
    where = "Llama2-7B on an A100, 16 bits"
    rows += [
        *((f"paper: {name}, q = 1", *found, where) for name, found in zip(paper.INNER, flat, strict=True)),
        ("paper: times faster", *(slow / fast for slow, fast in zip(*flat, strict=True)), where),
    ]
    return Table(
        name="inner",
        title="The inner loop in one pass, seconds a step (the paper's tab:ablation-inner)",
        columns=("who", *WIDTHS, "setting"),
        rows=tuple(rows),
        notes=f"{SAME_SEQUENCES} The paper's ratios are of its rounded seconds.",
    )


def _outer(grid: Grid) -> Table | None:
    batch, rows = 16, []
    why = grid.differs("same q, E and lengths")
    for engine in ("eager", "executorch"):
        for name, contender in (("inner", Contender.INNER), ("outer", Contender.OUTER), ("both", Contender.MOBIZO)):
            for what, find in (("s / step", grid.seconds), ("peak GB", grid.gigabytes)):
                found = [
                    find(contender, length, batch, q, engine=engine) for length in LENGTHS for q in paper.OUTER_QUERIES
                ]
                rows.append((f"{name} in one pass, {engine}: {what}", *found, why))
    rows = [row for row in rows if _some([row], 1, -1)]
    if not rows:
        return None
    where = "Llama2-7B on an A100, 16 bits"
    rows += [
        ("paper, outer: s / step", *(each for by_q in paper.OUTER_SECONDS for each in by_q), where),
        ("paper, outer: peak GB", *(each for by_q in paper.OUTER_GB for each in by_q), where),
    ]
    return Table(
        name="outer",
        title="The outer loop in one pass, batch 16 (the paper's tab:ablation-outer)",
        columns=("who", *(f"S {length}, q {q}" for length in LENGTHS for q in paper.OUTER_QUERIES), "setting"),
        rows=tuple(rows),
        notes="q = 1: outer is MeZO, one path a pass; both is the inner loop alone. E = 16 / q.",
    )


def _quantization(grid: Grid) -> Table | None:
    rows: list[tuple[Shown, ...]] = []
    for precision in ("fp32", "int8", "int4"):
        which: dict[str, Any] = {"engine": "executorch", "precision": precision}
        slow = _by_width(grid.seconds, Contender.MEZO_LORA_FA, **which)
        fast = _by_width(grid.seconds, Contender.INNER, **which)
        faster = [_ratio(*pair) for pair in zip(slow, fast, strict=True)]
        quantized = "weights alone are quantized in the paper's, activations too in ours"
        rows.append((f"ExecuTorch, {precision}", *faster, grid.differs(quantized)))
    if not _some(rows, 1, -1):
        return None
    rows += [
        (f"paper: {name}", *(each for by_batch in found for each in by_batch), f"{NEAREST} on an A100")
        for name, found in paper.QUANTIZATION[NEAREST].items()
    ]
    return Table(
        name="quantization",
        title="How many times faster the inner loop in one pass makes a step (the paper's fig:quantization)",
        columns=("precision", *WIDTHS, "setting"),
        rows=tuple(rows),
        notes=f"{SAME_SEQUENCES} q = 1, against two passes of one path each.",
    )


def _full(grid: Grid) -> Table | None:
    batches = (1, 8)  # of the paper's 1, 4 and 8, those of the grid
    rows: list[tuple[Shown, ...]] = []
    for name, contender in (("FO-SGD", Contender.FO_FULL), ("MeZO-SGD (q = 1)", Contender.MEZO_FULL)):
        found = [grid.seconds(contender, length, batch) for length in LENGTHS for batch in batches]
        rows.append((name, *found, grid.differs("the paper's first order runs on two GPUs")))
    if not _some(rows, 1, -1):
        return None
    for name, by_length in paper.MEZO_RUNTIME.items():
        at = [paper.MEZO_RUNTIME_BATCHES.index(batch) for batch in batches]
        rows.append((f"paper: {name}", *(by_batch[i] for by_batch in by_length for i in at), "Llama2-7B on A100, fp16"))
    return Table(
        name="full",
        title="All parameters, seconds a step (the paper's tab:mezo_runtime)",
        columns=("who", *(f"S {length}, B {batch}" for length in LENGTHS for batch in batches), "setting"),
        rows=tuple(rows),
        notes="PyTorch eager. The paper's batch 4 is not of this grid.",
    )


def _jetson(grid: Grid) -> Table | None:
    batches = (1, 8)
    rows: list[tuple[Shown, ...]] = []
    for precision in ("int8", "int4"):
        which: dict[str, Any] = {"engine": "executorch", "precision": precision}
        for name, contender in (("MeZO (LoRA-FA)", Contender.MEZO_LORA_FA), ("MobiZO", Contender.INNER)):
            found = [
                grid.seconds(contender, length, batch, **which) for length in paper.JETSON_LENGTHS for batch in batches
            ]
            rows.append((f"{name}, {precision}", *found, grid.differs("ExecuTorch, activations quantized too")))
    if not _some(rows, 1, -1):
        return None
    for name, by_length in paper.JETSON[NEAREST].items():
        at = [paper.JETSON_BATCHES.index(batch) for batch in batches]
        rows.append((f"paper: {name}", *(by_batch[i] for by_batch in by_length for i in at), f"{NEAREST}, Jetson, NF4"))
    return Table(
        name="jetson",
        title="On a device, 4 and 8 bits, seconds a step (the paper's tab:jetson)",
        columns=("who", *(f"S {length}, B {batch}" for length in paper.JETSON_LENGTHS for batch in batches), "setting"),
        rows=tuple(rows),
        notes="q = 1, the inner loop. Ours is no Jetson: what compares is the ratio of the two rows.",
    )


def plots_of(grid: Grid) -> list[Plot]:
    """Seconds over length at batch 16, and peak memory at the longest, in PyTorch eager and ExecuTorch."""
    batch = 16
    whose: tuple[tuple[str, Contender, int, Engine], ...] = (
        ("FO (LoRA-FA), eager", Contender.FO_LORA_FA, 1, "eager"),
        ("FO (LoRA-FA, checkpointing), eager", Contender.FO_CHECKPOINTING, 1, "eager"),
        ("MeZO (LoRA-FA), eager", Contender.MEZO_LORA_FA, 1, "eager"),
        ("MobiZO q = 4, eager", Contender.MOBIZO, 4, "eager"),
        ("MobiZO q = 4, ExecuTorch", Contender.MOBIZO, 4, "executorch"),
    )
    made = []
    for name, what, unit, find in (
        ("seconds", "A step", "seconds", grid.seconds),
        ("memory", "Peak memory", "GB", grid.gigabytes),
    ):
        series = {
            label: tuple(
                (float(length), value)
                for length in LENGTHS
                if (value := find(contender, length, batch, q, engine=engine)) is not None
            )
            for label, contender, q, engine in whose
        }
        series = {label: points for label, points in series.items() if points}
        if series:
            title = f"{what} of {grid.model}, batch {batch}"
            made.append(Plot(name=name, title=title, x="sequence length", y=unit, series=series, log_y=True))
    return made
