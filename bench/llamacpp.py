"""llama.cpp in this process, by xllamacpp, and GGUF files of SmolLM2-135M in its formats."""

from pathlib import Path
from typing import Any

import gguf
import psutil
import xllamacpp

from bench.programs import model_file
from bench.result import notes
from tests.server.gguf_files import rewrite


def write_quantized(kind: str, path: Path) -> Path:
    """Writes the model with its matrices in the format `kind`, such as Q8_0, unless `path` exists; returns `path`."""
    if not path.exists():
        notes.print(f"writing {path.name}")
        rewrite(model_file(), path, gguf.GGMLQuantizationType[kind])
    return path


class LlamaCpp:
    """One loaded model, with one thread a core and llama.cpp's defaults otherwise."""

    def __init__(self, path: Path, context: int) -> None:
        """context: in tokens."""
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = psutil.cpu_count()
        params.fit_params, params.verbosity = False, -1
        self._server = xllamacpp.Server(params)

    def decode(self, tokens: list[int], count: int) -> float:
        """Returns the seconds of one token after the prompt, the mean of `count`."""
        timings = self._timings(tokens, count + 1)
        return float(timings["predicted_ms"]) / 1e3 / count  # the first token is part of the prompt's time

    def prefill(self, tokens: list[int]) -> float:
        """Returns the seconds of a prompt."""
        return float(self._timings(tokens, 1)["prompt_ms"]) / 1e3

    def _timings(self, tokens: list[int], count: int) -> Any:
        request = {"prompt": tokens, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        timings = self._server.handle_completions(request)["timings"]
        if (timings["prompt_n"], timings["predicted_n"]) != (len(tokens), count):
            raise RuntimeError(f"llama.cpp processed other tokens than requested: {timings}")
        return timings
