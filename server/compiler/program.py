"""Compiles one recipe: training and inference programs, weights, tokenizer, and the manifest that describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.compiler.checkpoints.base import BaseFacts, locate_base
from server.compiler.checkpoints.checkpoint import load_checkpoint
from server.compiler.checkpoints.tokenizer import end_tokens, write_tokenizer
from server.compiler.cost import step_flops
from server.compiler.export.backends import backend
from server.compiler.export.gradient_network import GradientNetwork
from server.compiler.export.lowered_files import LoweredFiles
from server.compiler.export.lowering import at_once
from server.compiler.export.network import BaseNetwork, QuantizedBase
from server.compiler.methods.inference import InferenceNetwork
from shared.canonical import file_sha256
from shared.errors import InvalidRecipe
from shared.precisions import check_precision
from shared.program import ProgramFile, ProgramManifest, Role
from shared.recipe import REVERSE_ESTIMATORS, Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import BaseShape, a_fingerprint, flat_size, lora_modules

Progress = Callable[[str, float], None]


def compile_program(
    recipe: Recipe,
    source: str,
    out_dir: Path,
    progress: Progress | None = None,
    *,
    inference: bool = True,
    calibration: Calibration | None = None,
    kept: Path | None = None,
) -> ProgramManifest:
    """Compiles `recipe` for the base at `source` into `out_dir` and returns the manifest, not yet signed.

    progress: called with the name of a stage and the fraction done, 0 to 1. inference: also write the inference file,
    if the backend supports it. calibration: the calibration named by the recipe, or None.
    kept: directory of what earlier compilations lowered, to which this one adds; None: it begins anew.
    Raises InvalidRecipe, UnknownBase, UnreadableCheckpoint, UnsupportedModel, ToolchainMissing or CompileFailed.
    """
    report = progress or (lambda stage, fraction: None)
    target = backend(recipe.backend)
    target.check()
    report("read", 0.0)
    checkpoint = load_checkpoint(source)
    facts = checkpoint.facts
    check_recipe(recipe, facts)
    fingerprint = a_fingerprint(recipe, facts, calibration)
    files = {role: name for role, name in target.files.items() if inference or role != "inference"}
    out_dir.mkdir(parents=True, exist_ok=True)
    sources = locate_base(source)
    write_tokenizer(sources, out_dir / files["tokenizer"])
    with TemporaryDirectory(prefix=".tensors-", dir=out_dir) as directory:
        base = QuantizedBase.of(checkpoint, recipe.precision, Path(directory))
        stored = target.write_weights(base.stored, out_dir / files["weights"])
        report("lower", 0.0)
        kind = GradientNetwork if recipe.estimator in REVERSE_ESTIMATORS else BaseNetwork
        lower = partial(target.lower, stored=stored, kept=LoweredFiles(kept))

        def train() -> dict[str, Any]:
            network = kind(recipe, base, lower, target.dynamic_length, calibration)
            methods = network.methods()
            report("emit", 0.0)
            emitted = target.emit(methods, stored, out_dir / files["program"])
            return {"methods": tuple(methods), "dynamic_length": network.dynamic_length, **asdict(emitted)}

        def infer() -> dict[str, Any]:
            network = InferenceNetwork(recipe, base, lower, calibration=calibration)
            target.emit(network.methods(), stored, out_dir / files["inference"])
            return {"inference_context": network.context}

        written = at_once([infer, train] if "inference" in files else [train])
        facts_of_files = {name: value for part in written for name, value in part.items()}
    report("emit", 1.0)
    stop_tokens = end_tokens(sources, facts.vocabulary)
    return ProgramManifest(
        recipe=recipe,
        recipe_id=recipe.id,
        shape=BaseShape(**{name: getattr(facts, name) for name in BaseShape.model_fields}),
        size=flat_size(recipe, facts),
        a_sha256=fingerprint,
        score_rows=recipe.score_rows,
        files=tuple(_file(role, out_dir / name) for role, name in files.items()),
        flops_per_step=step_flops(recipe, facts),
        **facts_of_files,
        executorch=version("executorch"),
        end_of_text=next(iter(stop_tokens), None),
        # Agents of earlier releases refuse a field that they do not know.
        stop_tokens=stop_tokens if len(stop_tokens) > 1 else (),
    )


def check_recipe(recipe: Recipe, facts: BaseFacts) -> None:
    """Raises InvalidRecipe, naming the field, if `recipe` does not match the base."""
    if recipe.base.sha256 != facts.sha256:
        raise InvalidRecipe(
            f"base.sha256 is {recipe.base.sha256[:12]}..., but the files of {recipe.base.name} have "
            f"{facts.sha256[:12]}...; the files were changed or belong to another model"
        )
    lora_modules(recipe, facts)  # raises for an unknown layer or target
    if recipe.precision not in (precisions := backend(recipe.backend).precisions):
        raise InvalidRecipe(
            f"precision {recipe.precision} is not one that backend {recipe.backend} has "
            f"({', '.join(sorted(precisions))}); xnnpack has every one"
        )
    check_precision(recipe.precision, facts, reverse=recipe.estimator in REVERSE_ESTIMATORS)
    if recipe.kl and recipe.loss == "full" and facts.final_softcap is not None:
        raise InvalidRecipe(
            f"training.kl_weight needs loss candidates with {facts.architecture}, which caps its logits; use it, or "
            "training.proximal, which pulls B to the start"
        )
    if recipe.sequence_length > facts.context_length:
        raise InvalidRecipe(
            f"sequence_length {recipe.sequence_length} exceeds the model's context of {facts.context_length} tokens"
        )
    if recipe.answer_length >= recipe.sequence_length:
        raise InvalidRecipe(
            f"answer_length {recipe.answer_length} leaves no prompt in sequence_length {recipe.sequence_length}"
        )


def _file(role: Role, path: Path) -> ProgramFile:
    return ProgramFile(role=role, name=path.name, size=path.stat().st_size, sha256=file_sha256(path))
