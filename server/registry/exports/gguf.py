"""Writes an adapter as a GGUF file that llama.cpp loads onto its own form of the base (`--lora`). Needs no torch.

Names of tensors and the order of rows are those of the base's own GGUF file, by the table that reads such files. The
columns of A belong to a layer's input, whose order is the same everywhere. llama.cpp multiplies by alpha over the rank
of a tensor: where one tensor holds several targets, B is scaled for that. Other architectures are refused.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from server.compiler.checkpoints.gguf_names import (
    ARCHITECTURES,
    GATE_UP,
    LINEARS,
    GgufArchitecture,
    gguf_architecture,
    gguf_rows,
)
from server.registry.exports.frozen_a import Place, by_module, joined
from shared.errors import UnsupportedFormat
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import F32, BaseShape, LoraModule, module_names


def gguf_lora(
    recipe: Recipe, shape: BaseShape, flat: F32, a_sha256: str, calibration: Calibration | None = None
) -> bytes:
    """A and B as a GGUF adapter, float32; the same arguments give the same bytes.

    flat: B, float32 (D,). a_sha256: fingerprint of the A that B was trained with. calibration: the one that
    the recipe names, if it names one. Raises UnsupportedFormat for an architecture without a GGUF name, AMismatch,
    InvalidUpload when B is not of the recipe's size, or InvalidRecipe without the calibration.
    """
    # Imported here: a web process without requests for GGUF does not load it.
    import gguf

    form = supported_form(shape)

    def place_of(module: LoraModule) -> Place:
        kind = shape.of_layer(module.layer)
        held = module_names(kind).fused.values()
        targets = next((targets for targets in held if module.target in targets), (module.target,))
        before = targets[: targets.index(module.target)]
        rows = gguf_rows(form, kind, module.target) + sum(kind.features(target)[1] for target in before)
        linears = form.linears if kind.convolves else LINEARS
        names = {**{targets: name for name, targets in linears.items()}, GATE_UP: "ffn_up"}
        return Place(f"blk.{module.layer}.{names[targets]}.weight", targets, rows)

    adapted = joined(recipe, shape, flat, a_sha256, calibration)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "adapter.gguf"
        writer = gguf.GGUFWriter(path, form.name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, recipe.alpha)
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, recipe.base.name)
        writer.add_string("mobizo.base_sha256", recipe.base.sha256)
        writer.add_string("mobizo.recipe_id", recipe.id)
        writer.add_string("mobizo.a_sha256", a_sha256)
        for name, (a, b) in by_module(recipe, shape, adapted, place_of).items():
            writer.add_tensor(f"{name}.lora_a", a)  # (r, in)
            writer.add_tensor(f"{name}.lora_b", b * np.float32(len(a) / recipe.rank))  # (out, r)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def supported_form(shape: BaseShape) -> GgufArchitecture:
    """Returns how llama.cpp holds the base. Raises UnsupportedFormat for an architecture without a GGUF name."""
    form = gguf_architecture(shape.architecture)
    if form is None:
        names = ", ".join(ARCHITECTURES)
        raise UnsupportedFormat(
            f"GGUF adapters are not written for architecture {shape.architecture!r}, only for llama.cpp's {names}; "
            "use the PEFT format"
        )
    return form
