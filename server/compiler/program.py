"""One recipe compiled: `program.pte`, `weights.ptd`, `tokenizer.json`, and the manifest that describes them.

Knows the order of the work and what must be refused; knows no HTTP, no database, no signature.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from server.compiler.base import BaseFacts, locate_base
from server.compiler.checkpoint import Checkpoint, load_checkpoint
from server.compiler.cost import step_flops
from server.compiler.decoder import DecoderLayer, LayerTables, layer_shape
from server.compiler.delegates import lower_layers
from server.compiler.emission import Signature, emit
from server.compiler.methods import Adapter, Load, Replay, Score, Step, Trunk
from server.compiler.tokenizer import write_tokenizer
from server.compiler.weights import write_weights
from shared.canonical import file_sha256
from shared.errors import InvalidRecipe
from shared.lora import BaseShape, a_fingerprint, flat_size, init_a, lora_modules
from shared.program import METHODS, SEED_DTYPE, TOKEN_DTYPE, ProgramFile, ProgramManifest, Role
from shared.recipe import Recipe, Target

Progress = Callable[[str, float], None]

FILES: dict[Role, str] = {"program": "program.pte", "weights": "weights.ptd", "tokenizer": "tokenizer.json"}


def compile_program(recipe: Recipe, source: str, out_dir: Path, progress: Progress | None = None) -> ProgramManifest:
    """Compiles `recipe` for the base at `source` into `out_dir` and returns the manifest, not yet signed.

    progress: called with a stage's name and its fraction done, 0 to 1.
    Raises InvalidRecipe, UnknownBase, UnreadableCheckpoint, UnsupportedModel or CompileFailed.
    """
    report = progress or (lambda stage, fraction: None)
    report("read", 0.0)
    checkpoint = load_checkpoint(source)
    facts = checkpoint.facts
    check_recipe(recipe, facts)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_tokenizer(locate_base(source), out_dir / FILES["tokenizer"])
    stored = write_weights(checkpoint.tensors(), out_dir / FILES["weights"])
    layers = decoder_layers(recipe, checkpoint)
    if recipe.backend == "xnnpack":
        report("lower", 0.0)
        layers = lower_layers(layers, layer_example(recipe, facts), stored)
    report("emit", 0.0)
    emitted = emit(program_methods(recipe, checkpoint, layers), stored, out_dir / FILES["program"])
    report("emit", 1.0)
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields}),
        size=flat_size(recipe, facts),
        a_sha256=a_fingerprint(recipe, facts),
        score_rows=recipe.score_rows,
        files=tuple(_file(role, out_dir / name) for role, name in FILES.items()),
        planned_bytes=emitted.planned_bytes,
        flops_per_step=step_flops(recipe, facts),
        delegates=emitted.delegates,
        nodes=emitted.nodes,
        executorch=version("executorch"),
    )


def check_recipe(recipe: Recipe, facts: BaseFacts) -> None:
    """Raises InvalidRecipe, naming the field, when `recipe` does not fit the base."""
    if recipe.base.sha256 != facts.sha256:
        raise InvalidRecipe(
            f"base.sha256 is {recipe.base.sha256[:12]}..., but {recipe.base.name}'s files here are "
            f"{facts.sha256[:12]}...; they changed or are another model's"
        )
    if recipe.sequence_length > facts.context_length:
        raise InvalidRecipe(
            f"sequence_length {recipe.sequence_length} is over the model's context of {facts.context_length} tokens"
        )
    if recipe.answer_length >= recipe.sequence_length:
        raise InvalidRecipe(
            f"answer_length {recipe.answer_length} leaves no prompt in sequence_length {recipe.sequence_length}"
        )


def decoder_layers(recipe: Recipe, checkpoint: Checkpoint) -> list[nn.Module]:
    """The recipe's decoder layers, not lowered."""
    shape = layer_shape(recipe, checkpoint.facts)
    scaled: list[dict[Target, Tensor]] = [{} for _ in range(checkpoint.facts.layers)]
    for module in lora_modules(recipe, checkpoint.facts):
        a = np.ascontiguousarray(init_a(recipe, module).T) * np.float32(recipe.scale)  # (r, in)
        scaled[module.layer][module.target] = torch.from_numpy(a)
    return [DecoderLayer(shape, checkpoint.layers[index], scaled[index]) for index in range(checkpoint.facts.layers)]


def layer_example(recipe: Recipe, facts: BaseFacts) -> tuple[Tensor, ...]:
    """Inputs that one layer is exported with, as `DecoderLayer` takes them."""
    shape = layer_shape(recipe, facts)
    hidden, slab = torch.zeros(shape.rows, shape.sequence, facts.hidden), torch.zeros(shape.paths, shape.slab)
    return hidden, slab, torch.ones(facts.hidden), torch.ones(facts.hidden), *LayerTables(shape)()


def program_methods(recipe: Recipe, checkpoint: Checkpoint, layers: list[nn.Module]) -> dict[str, Signature]:
    """Every method of the program with its example inputs, as `shared.program` lists them."""
    facts = checkpoint.facts
    trunk = Trunk(recipe, facts, layers, checkpoint.embedding, checkpoint.norms, checkpoint.lm_head)
    size = flat_size(recipe, facts)

    def tokens(*shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, TOKEN_DTYPE))

    q, e, s = recipe.queries, recipe.effective_batch, recipe.sequence_length
    t, c, r = recipe.answer_length, recipe.choices, recipe.score_rows
    labels = (tokens(e, t),) if recipe.loss == "full" else (tokens(e, t, c), torch.ones(e, t, c))
    seeds = torch.from_numpy(np.zeros((q, 2), SEED_DTYPE))
    scalar = torch.ones(1)
    methods: dict[str, Signature] = {
        "step": (
            Step(recipe, size, trunk),
            (tokens(e, s), tokens(e, t), *labels, torch.ones(e, t), seeds, scalar, scalar.clone()),
        ),
        "replay": (Replay(recipe, size), (seeds, torch.zeros(q))),
        "score": (Score(recipe, size, trunk), (tokens(r, s), tokens(r, t), tokens(r, t, c))),
        "adapter": (Adapter(recipe, size), ()),
        "load": (Load(recipe, size), (torch.zeros(size),)),
    }
    return {name: methods[name] for name in METHODS}


def _file(role: Role, path: Path) -> ProgramFile:
    return ProgramFile(role=role, name=path.name, size=path.stat().st_size, sha256=file_sha256(path))
