"""The paper's figures that `bench step` and `bench padding` are laid beside, as its tables print them.

Gao et al., "MobiZO", EMNLP 2025. Server figures are of one A100 (zeroth order in 16 bits, first order by mixed
precision; loss over the whole vocabulary), Jetson's of an Orin Nano 8 GB.
"""

from __future__ import annotations

LENGTHS = (64, 128, 256)
BATCHES = (1, 8, 16)
MODELS = ("TinyLlama-1.1B", "Llama2-7B")
Grid = tuple[tuple[float, ...], ...]  # by length, then by batch

# Table 2, tab:memory: peak GB by method, lengths LENGTHS, batches BATCHES.
MEMORY: dict[str, dict[str, Grid]] = {
    "TinyLlama-1.1B": {
        "FO (Full)": ((11.32, 12.00, 12.78), (11.44, 13.00, 14.76), (11.77, 15.62, 20.02)),
        "FO (LoRA-FA)": ((4.15, 5.00, 5.98), (4.27, 5.98, 7.81), (4.51, 7.81, 11.58)),
        "MeZO (LoRA-FA)": ((2.09, 2.19, 2.32), (2.10, 2.32, 2.56), (2.13, 2.56, 3.05)),
        "MobiZO": ((2.11, 2.32, 2.56), (2.14, 2.56, 3.05), (2.20, 3.05, 3.98)),
    },
    "Llama2-7B": {
        "FO (Full)": ((64.31, 66.12, 69.20), (64.6, 68.51, 72.97), (65.32, 74.22, 84.40)),
        "FO (LoRA-FA)": ((25.16, 27.20, 29.58), (25.46, 29.58, 34.28), (26.05, 34.29, 43.66)),
        "MeZO (LoRA-FA)": ((12.59, 12.70, 12.82), (12.61, 12.82, 13.06), (12.64, 13.06, 13.55)),
        "MobiZO": ((12.61, 12.82, 13.06), (12.64, 13.07, 13.55), (12.70, 13.55, 14.53)),
    },
}

# Table 3, tab:jetson: seconds a step, NF4 weights, q = 1, inner loop; lengths 64 and 128, batches 1, 2, 4, 8.
JETSON_LENGTHS, JETSON_BATCHES = (64, 128), (1, 2, 4, 8)
JETSON: dict[str, dict[str, Grid]] = {
    "TinyLlama-1.1B": {
        "MeZO (LoRA-FA)": ((0.69, 0.71, 0.89, 1.28), (0.70, 0.88, 1.27, 2.18)),
        "MobiZO": ((0.43, 0.49, 0.69, 1.15), (0.49, 0.69, 1.13, 2.00)),
    },
    "Llama2-7B": {
        "MeZO (LoRA-FA)": ((3.10, 3.37, 4.44, 6.46), (3.37, 4.44, 6.47, 10.83)),
        "MobiZO": ((1.69, 2.22, 3.22, 5.38), (2.22, 3.22, 5.37, 8.60)),
    },
}

# tab:mezo_runtime: seconds a step over all parameters of Llama2-7B, 16 bits; first order on two A100. Batches 1, 4, 8.
MEZO_RUNTIME_BATCHES = (1, 4, 8)
MEZO_RUNTIME: dict[str, Grid] = {
    "FO-SGD": ((0.17, 0.21, 0.34), (0.19, 0.33, 0.49), (0.18, 0.49, 0.90)),
    "MeZO-SGD (q=1)": ((0.43, 0.48, 0.56), (0.43, 0.56, 0.73), (0.45, 0.73, 1.05)),
}

# tab:ablation-outer: outer loop alone, Llama2-7B, batch 16; by length, for q = 1, 4, 16.
OUTER_QUERIES = (1, 4, 16)
OUTER_SECONDS: Grid = ((0.18, 0.20, 0.19), (0.35, 0.37, 0.32), (0.69, 0.67, 0.71))
OUTER_GB: Grid = ((12.61, 12.69, 12.81), (12.64, 12.80, 13.14), (12.70, 13.04, 13.53))

# tab:ablation-inner: inner loop alone, q = 1, Llama2-7B, seconds a step; lengths LENGTHS, batches BATCHES.
INNER: dict[str, Grid] = {
    "MeZO (LoRA-FA)": ((0.07, 0.11, 0.18), (0.07, 0.19, 0.35), (0.07, 0.35, 0.69)),
    "MobiZO (inner)": ((0.04, 0.10, 0.18), (0.04, 0.18, 0.34), (0.06, 0.34, 0.67)),
}

# Figure 7, fig:quantization: how many times faster the inner loop makes a step, weight-only quantization.
QUANTIZATION: dict[str, dict[str, Grid]] = {
    "TinyLlama-1.1B": {
        "NF4": ((1.728, 1.732, 1.692), (1.845, 1.673, 1.433), (1.821, 1.475, 1.257)),
        "INT8": ((1.802, 1.675, 1.654), (1.653, 1.559, 1.211), (1.694, 1.204, 1.097)),
        "FP16": ((1.508, 1.399, 1.375), (1.532, 1.432, 1.000), (1.591, 1.050, 1.056)),
    },
    "Llama2-7B": {
        "NF4": ((1.970, 1.303, 1.291), (1.948, 1.463, 1.332), (1.914, 1.180, 1.116)),
        "INT8": ((1.820, 1.371, 1.176), (1.758, 1.176, 1.107), (1.666, 1.106, 1.078)),
        "FP16": ((1.788, 1.112, 1.032), (1.673, 1.043, 1.024), (1.302, 1.025, 1.036)),
    },
}

# fig:padding_tokens: percent of tokens that are padding, mean over batches of 16 and of 4.
PADDING: dict[str, tuple[float, float]] = {
    "sst2": (57.83, 38.27),
    "rte": (51.76, 32.69),
    "boolq": (50.37, 32.24),
    "wsc": (44.58, 24.11),
    "wic": (24.76, 13.66),
    "multirc": (3.94, 1.31),
    "copa": (25.88, 16.39),
    "winogrande": (22.79, 10.42),
    "mrpc": (24.90, 16.07),
    "qqp": (35.22, 19.08),
    "qnli": (36.21, 21.75),
    "wnli": (36.28, 20.56),
}
