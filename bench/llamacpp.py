"""llama.cpp in this process, by xllamacpp, and GGUF files of SmolLM2-135M in its formats."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import xllamacpp

from bench.programs import model_file
from bench.result import notes

# Prefixes of fields that the writer sets itself.
REWRITTEN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write_quantized(kind: str, path: Path) -> Path:
    """Writes the model with its matrices in the format `kind`, such as Q8_0, unless `path` exists; returns `path`."""
    if path.exists():
        return path
    notes.print(f"writing {path.name}")
    reader = gguf.GGUFReader(model_file())
    temporary, format_ = path.with_suffix(".part"), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(temporary, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(REWRITTEN_FIELDS):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 2:
            data = gguf.quants.quantize(values, format_)
            writer.add_tensor(tensor.name, data, raw_shape=data.shape, raw_dtype=format_)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(path)
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
