"""The weights file of a streamed base, byte for byte that of all tensors in memory at once, rounded here in NumPy."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.tensor_layout import TensorLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from transformers import PreTrainedModel

from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.export.network import QuantizedBase
from server.compiler.export.weights import write_weights
from shared.recipe import TARGETS, Precision
from shared.zo.lora import hf_module_name
from tests.server.compiler.checkpoints.test_checkpoint import write_gguf
from tests.server.compiler.conftest import TinyBase, make_tiny


def rounded(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and a scale for each row, the largest magnitude over 127."""
    scales = (np.abs(table).max(axis=1) / np.float32(127)).astype(np.float32)
    return np.rint(table / scales[:, None]).astype(np.int8), scales


def whole_file(model: PreTrainedModel, precision: Precision) -> bytes:
    """The `.ptd` of the model's tensors, every one in memory."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    tensors: list[tuple[str, str, np.ndarray]] = []  # name in graphs or "", key, values

    def add(name: str, values: np.ndarray, prefix: str = "") -> None:
        values = np.ascontiguousarray(values)
        tensors.append((name, prefix + sha256(values.tobytes()).hexdigest(), values))

    layers = range(model.config.num_hidden_layers)
    stems = [f"model.layers.{at}.{norm}" for at in layers for norm in ("input_layernorm", "post_attention_layernorm")]
    add("backbone.norms", np.stack([state[f"{stem}.weight"] for stem in [*stems, "model.norm"]]))
    tables = {"embedding": "model.embed_tokens.weight"}
    if not model.config.tie_word_embeddings:
        tables["lm_head"] = "lm_head.weight"
    for name, stock in tables.items():
        if precision == "fp32":
            add(f"backbone.{name}", state[stock])
            continue
        values, scales = rounded(state[stock])
        add(f"backbone.{name}", values)
        add(f"backbone.{name}_scale", scales.reshape(-1, 1), "scale_")
    for at in layers:
        for target in TARGETS:
            weight = state[f"model.layers.{at}.{hf_module_name('llama', target)}.weight"]
            if precision == "fp32":
                add(f"layers.{at}.frozen.{target}", weight)
                continue
            values, scales = rounded(weight)
            add("", values)
            add("", scales, "scale_")
    buffers, entries = list[bytes](), dict[str, DataEntry]()
    for name, key, values in sorted(tensors, key=lambda each: each[:2]):
        if key not in entries:
            entries[key] = DataEntry(len(buffers), 16, None)
            buffers.append(values.tobytes())
        if name:
            layout = TensorLayout.from_tensor(torch.from_numpy(values))
            entries[name] = DataEntry(entries[key].buffer_index, 16, layout)
    return bytes(FlatTensorSerializer().serialize(DataPayload(buffers, entries)))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> TinyBase:
    model = make_tiny(tmp_path / "base", seed=3, tie_word_embeddings=request.param)
    layers = model.model.model.layers
    layers[1].mlp.up_proj.weight.data.copy_(layers[0].mlp.up_proj.weight)  # equal tensors are stored once
    return model


@pytest.mark.parametrize("form", ["shards", "gguf"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_streamed_base_is_the_same_file(
    base: TinyBase, form: Literal["shards", "gguf"], precision: Precision, tmp_path: Path
) -> None:
    source, tensors = tmp_path / form, tmp_path / "tensors"
    if form == "gguf":
        write_gguf(base, source)
    else:
        base.model.to(torch.bfloat16).save_pretrained(source, max_shard_size="8KB")
        assert len(list(source.glob("*.safetensors"))) > 2
    tensors.mkdir()
    quantized_base = QuantizedBase.of(load_checkpoint(str(source)), precision, tensors)
    keys = write_weights(quantized_base.stored, tmp_path / "weights.ptd")
    assert (tmp_path / "weights.ptd").read_bytes() == whole_file(base.model, precision)
    assert {stored.key for stored in quantized_base.stored} <= set(keys)
