"""The paper's accuracy figures, in percent, as its tables print them, and which of them is nearest to a run of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Figures = Mapping[str, Mapping[str, float]]  # method, then data set

GLUE = ("sst2", "rte", "mrpc", "qqp", "qnli", "wnli")
LARGE = ("sst2", "rte", "boolq", "wsc", "wic", "multirc", "copa", "winogrande", "arc-easy", "arc-challenge")
ZERO, FO_FULL, FO, MEZO_FULL, MEZO, Q4, Q16 = (
    "zero-shot",
    "FO-SGD (full)",
    "FO-SGD (LoRA-FA)",
    "MeZO (full)",
    "MeZO (LoRA-FA)",
    "MobiZO q=4",
    "MobiZO q=16",
)


def _rows(tasks: tuple[str, ...], rows: Mapping[str, tuple[float, ...]]) -> Figures:
    return {method: dict(zip(tasks, figures, strict=True)) for method, figures in rows.items()}


TINYLLAMA = _rows(  # Table 1, tab:model-perf
    GLUE,
    {
        ZERO: (55.5, 51.6, 68.4, 32.8, 52.7, 43.7),
        FO_FULL: (93.0, 80.6, 80.0, 84.0, 83.6, 58.2),
        FO: (93.0, 77.7, 79.1, 83.3, 84.3, 54.9),
        MEZO_FULL: (91.1, 65.3, 70.8, 73.7, 69.2, 58.2),
        MEZO: (86.5, 67.1, 72.1, 74.7, 62.4, 59.2),
        Q4: (88.5, 70.5, 73.6, 76.4, 75.0, 60.6),
        Q16: (89.7, 72.4, 73.4, 77.0, 76.7, 59.6),
    },
)
LLAMA2 = _rows(  # Table 1, tab:model-perf
    LARGE,
    {
        ZERO: (58.0, 59.2, 71.9, 52.9, 50.0, 54.9, 79.0, 62.7, 47.9, 35.0),
        FO_FULL: (95.8, 86.5, 85.3, 66.0, 72.5, 82.4, 87.0, 67.0, 80.6, 66.2),
        FO: (95.4, 81.7, 84.9, 62.8, 62.6, 74.7, 84.0, 64.2, 81.3, 60.7),
        MEZO_FULL: (92.2, 73.5, 81.9, 64.7, 55.6, 68.6, 84.0, 64.5, 69.8, 47.5),
        MEZO: (92.4, 70.8, 81.6, 63.5, 63.4, 72.3, 86.3, 64.2, 73.6, 50.6),
        Q4: (94.1, 75.5, 82.7, 64.1, 63.1, 74.7, 85.0, 64.8, 73.8, 50.9),
        Q16: (94.2, 75.5, 82.7, 62.5, 63.7, 72.9, 87.3, 64.9, 73.2, 51.4),
    },
)
OPT = _rows(  # Table 10, tab:opt
    GLUE,
    {
        MEZO_FULL: (92.4, 57.8, 70.6, 67.7, 56.2, 59.2),
        MEZO: (89.8, 62.8, 70.6, 69.3, 58.9, 59.2),
        Q4: (92.0, 62.8, 71.3, 73.1, 65.4, 60.6),
        Q16: (91.5, 62.8, 71.3, 74.3, 65.8, 60.6),
    },
)
LLAMA3 = _rows(  # Table 11, tab:llama3
    GLUE,
    {
        MEZO_FULL: (91.9, 63.9, 70.6, 75.6, 67.7, 60.6),
        MEZO: (92.8, 64.6, 70.3, 73.6, 60.4, 63.4),
        Q4: (93.8, 64.6, 74.8, 76.2, 63.7, 63.4),
        Q16: (93.7, 65.3, 73.0, 77.9, 67.8, 63.4),
    },
)
QWEN3 = _rows(  # Table 12, tab:qwen3
    GLUE,
    {
        MEZO_FULL: (87.6, 74.7, 74.3, 76.9, 66.3, 69.0),
        MEZO: (87.2, 77.9, 78.7, 79.1, 73.6, 63.4),
        Q4: (87.8, 75.8, 79.2, 80.5, 74.6, 66.2),
        Q16: (87.4, 75.5, 78.9, 81.1, 80.8, 63.4),
    },
)
SMOLLM = _rows(  # Table 13, tab:smollm
    GLUE,
    {
        MEZO_FULL: (75.0, 55.2, 68.6, 67.3, 55.4, 57.8),
        MEZO: (87.6, 54.2, 72.8, 71.8, 73.2, 53.5),
        Q4: (87.4, 56.0, 73.5, 71.1, 75.3, 56.3),
        Q16: (87.4, 57.4, 72.8, 74.2, 74.6, 53.5),
    },
)
MODELS: Mapping[str, Figures] = {
    "TinyLlama-1.1B": TINYLLAMA,
    "Llama2-7B": LLAMA2,
    "OPT-1.3B": OPT,
    "Llama3.2-1B": LLAMA3,
    "Qwen3-0.6B": QWEN3,
    "SmolLM-340M": SMOLLM,
}
_NAMES = {  # what the published models are called
    "tinyllama": "TinyLlama-1.1B",
    "llama-2-7b": "Llama2-7B",
    "llama2-7b": "Llama2-7B",
    "opt-1.3b": "OPT-1.3B",
    "llama-3.2-1b": "Llama3.2-1B",
    "qwen3-0.6b": "Qwen3-0.6B",
}
QUANTIZED: Mapping[str, Figures] = {  # Table 14, tab:qlora, TinyLlama-1.1B
    "8 bits": _rows(GLUE, {Q4: (88.3, 70.3, 73.4, 76.2, 74.8, 60.3), Q16: (89.4, 72.2, 73.5, 76.9, 76.5, 59.7)}),
    "4 bits": _rows(GLUE, {Q4: (88.0, 70.1, 73.2, 76.1, 74.6, 59.6), Q16: (88.9, 72.1, 73.0, 77.1, 76.4, 58.2)}),
}
VARIANTS = {"lora": 90.9, "lora-fa": 92.0, "dora": 90.9, "vera": 91.4}  # Table 5, tab:preliminary: OPT-1.3B, SST-2
QUERIES = {  # Table 16, tab:multi-q: means over the model's tasks
    "TinyLlama-1.1B": {1: 70.33, 2: 73.62, 4: 74.10, 8: 74.82, 16: 74.80},
    "Llama2-7B": {1: 71.62, 2: 71.75, 4: 72.87, 8: 72.81, 16: 72.83},
}
SENTIMENT = "sst2"  # of the paper's data sets the nearest to the shipped reviews

# Table 9, tab:hyperparameters, and the training procedure above it
STEPS, STEPS_FO, STEPS_VARIANTS = 20_000, 1_000, 10_000
INTERVAL, INTERVAL_FO = 500, 100
GRID, GRID_FO = (5e-4, 1e-4, 5e-5, 1e-5), (5e-3, 1e-3, 5e-4)
GRID_VARIANTS, EPS_VARIANTS, VERA_RANK = (5e-6, 5e-5, 5e-4, 5e-3), (1e-3, 1e-2), 1024
TRAIN, VALIDATION, TEST, SEEDS = 1_000, 500, 1_000, 3


@dataclass(frozen=True)
class Cited:
    """One figure of the paper's, percent, and what it is of."""

    percent: float | None
    model: str
    task: str


def same_model(base: str) -> str | None:
    """The paper's model that `base` (a directory, file or id) is by its name, if any."""
    return next((model for name, model in _NAMES.items() if name in base.lower()), None)


def nearest(base: str, task: str, method: str) -> Cited:
    """The paper's figure of a method for the run's own model and data set, or for those nearest to them.

    For another model: SmolLM-340M, the smallest it has, or TinyLlama-1.1B and Llama2-7B for what that table lacks.
    """
    asked = task if task in GLUE + LARGE else SENTIMENT
    own = same_model(base)
    for model in (own,) if own else ("SmolLM-340M", "TinyLlama-1.1B", "Llama2-7B"):
        if asked in (found := MODELS[model].get(method, {})):
            return Cited(found[asked], model, asked)
    return Cited(None, own or "none", asked)
