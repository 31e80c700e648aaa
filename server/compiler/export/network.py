"""A recipe's network on one base: weights in the recipe's precision, lowered layers, and methods to export.

Each kind of layer (rows, paths, adapted or not) is lowered once and shared by all methods that use it.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.checkpoints.checkpoint import Checkpoint
from server.compiler.export.emission import Signature
from server.compiler.export.lowering import Example, LayerGroup, Lower
from server.compiler.export.weights import Stored
from server.compiler.methods.step_inputs import StepInputs, zero_seeds, zero_tokens
from server.compiler.methods.training import (
    Adapter,
    AnswerPass,
    Flush,
    Load,
    Prefix,
    Replay,
    Score,
    ScoreSuffix,
    Stack,
    Step,
    Suffix,
)
from server.compiler.model.answer_paths import AnswerLayer, KeyedLayer, answer_tables
from server.compiler.model.backbone import Backbone, BackboneTensors, states_for
from server.compiler.model.decoder import DecoderLayer, LayerShape, all_tables, layer_shapes, quantized_layer
from server.compiler.model.rounding import ROWS, SCALE, SCHEMES, Scheme, quantize
from server.compiler.model.vocabulary_head import HeadLayer, HeadReverse, SoftmaxHead
from shared.program import logits_part, lowers_softmax
from shared.program_inputs import MIN_LENGTH
from shared.recipe import Precision, Recipe, Target
from shared.zo.calibration import Calibration
from shared.zo.lora import flat_size, frozen_a, lora_modules


@dataclass(frozen=True)
class QuantizedBase:
    """The weights of a base model in one precision."""

    facts: BaseFacts
    precision: Precision
    backbone: BackboneTensors
    layers: tuple[dict[str, Tensor], ...]
    stored: tuple[Stored, ...]  # every tensor of the weights file

    @classmethod
    def of(cls, checkpoint: Checkpoint, precision: Precision, directory: Path | None = None) -> QuantizedBase:
        """Quantizes the checkpoint, one tensor at a time. In a quantized precision, tables have 8-bit rows.

        directory: an empty directory that holds the tensors while the base is in use; None: they are in memory.
        """
        stored: list[Stored] = []

        def store_tensor(name: str, tensor: Tensor, scheme: Scheme | None, path: str | None) -> Tensor:
            stored.append(Stored.of(name, tensor, scheme, path, directory))
            return stored[-1].tensor

        tables: dict[str, Tensor | None] = dict.fromkeys(field.name for field in fields(BackboneTensors))
        for name in ("norms", "head_norms", *checkpoint.tables):
            table = getattr(checkpoint, name) if name.endswith("norms") else checkpoint.tables[name]
            if table is None:
                continue
            if precision != "fp32" and name in ("embedding", "lm_head"):
                table, scales = quantize(table, ROWS)
                tables[name + SCALE] = store_tensor(name + SCALE, scales.unsqueeze(1), ROWS, f"backbone.{name}{SCALE}")
            tables[name] = store_tensor(name, table, ROWS, f"backbone.{name}")
        scheme, layers = SCHEMES.get(precision), list[dict[str, Tensor]]()
        for index, weights in enumerate(checkpoint.layers):
            layer: dict[str, Tensor] = {}
            for target in weights:
                for name, tensor in quantized_layer({target: weights[target]}, precision).items():
                    path = f"layers.{index}.frozen.{name}" if scheme is None else None
                    layer[name] = store_tensor(name, tensor, scheme, path)
            layers.append(layer)
        backbone = BackboneTensors(**tables)
        return cls(checkpoint.facts, precision, backbone, tuple(layers), tuple(stored))


class BaseNetwork:
    """The parts that all methods of a recipe share."""

    def __init__(
        self,
        recipe: Recipe,
        base: QuantizedBase,
        lower: Lower,
        dynamic_length: bool = True,
        calibration: Calibration | None = None,
    ) -> None:
        """lower: lowers layers of one graph for the backend. dynamic_length: see `Backend`.

        calibration: the calibration named by the recipe, or None.
        """
        self.recipe, self.facts, self._base, self._lower = recipe, base.facts, base, lower
        self.dynamic_length = dynamic_length and recipe.sequence_length > MIN_LENGTH
        self.size = flat_size(recipe, base.facts)
        self.backbone = Backbone(base.facts, base.backbone, recipe.sequence_length)
        self._scaled_a: list[dict[Target, Tensor]] = [{} for _ in range(base.facts.layers)]
        for module in lora_modules(recipe, base.facts):
            a = np.ascontiguousarray(frozen_a(recipe, module, calibration).T) * np.float32(recipe.scale)  # (r, in)
            self._scaled_a[module.layer][module.target] = torch.from_numpy(a)

    def layers(
        self,
        shapes: Sequence[LayerShape],
        indices: Iterable[int],
        kind: type[DecoderLayer],
        example: Callable[[LayerShape], Example],
    ) -> list[nn.Module]:
        """The base's layers `indices`, each of its shape, lowered if they are to be. example: as `lower_by_shape`."""
        plain = [
            kind(shape, self._base.layers[index], self._scaled_a[index])
            for shape, index in zip(shapes, indices, strict=True)
        ]
        return lower_by_shape(self._lower, plain, shapes, example)

    def stack(
        self,
        rows: int,
        paths: int,
        part: slice,
        adapted: bool = True,
        kind: type[DecoderLayer] = DecoderLayer,
        example: Callable[[LayerShape], Example] | None = None,
        picks: int = 0,
    ) -> Stack:
        """Returns the base's layers in `part`, for `rows` sequences of `paths` paths.

        example: the export inputs of a shape; None: those of whole sequences. picks: as `layer_shapes`.
        """
        shapes = layer_shapes(self.recipe, self.facts, rows, paths, adapted, picks)[part]
        indices = range(self.facts.layers)[part]
        whole = partial(layer_example, length=self.recipe.sequence_length)
        return Stack(shapes, self.layers(shapes, indices, kind, example or whole), indices.start)

    def answer_pass(self, part: slice) -> AnswerPass:
        """Returns the base's layers in `part`, for the answer's positions of every path."""
        recipe = self.recipe
        rows, paths = recipe.effective_batch * recipe.answer_paths, recipe.answer_paths
        stack = self.stack(rows, paths, part, kind=AnswerLayer, example=self._answer_example)
        return AnswerPass(stack, recipe.sequence_length)

    def _answer_example(self, shape: LayerShape) -> Example:
        """Returns the export inputs of one `AnswerLayer`."""
        facts, recipe = shape.facts, self.recipe
        examples, length, picks = recipe.effective_batch, recipe.sequence_length, recipe.answer_length
        hidden, *others = layer_example(shape, length)
        keys = torch.zeros(examples, length, facts.kv_heads * facts.head_dim)
        positions = zero_tokens(examples, picks)
        tables = answer_tables(
            facts,
            self.backbone.tables[-1 if facts.convolves else 0],
            positions,
            torch.ones(examples, picks),
            torch.arange(length, dtype=torch.int32),
            shape.paths,
        )
        count = bool(shape.targets) + len(facts.layer_norms) + len(facts.mixer_vectors)
        return (hidden[:, :picks], keys, torch.ones_like(keys), *tables[:2], *others[:count], *tables[2:])

    def head(self, rows: int, picks: int) -> nn.Module | None:
        """Returns the lowered lm_head over a quantized table; None for a float32 table.

        It takes as many of (rows, picks) positions as a program computes logits of at once.
        """
        if self._base.precision == "fp32":
            return None
        return self._lowered_head(self._head_layer(), self.part_of(rows, picks, self.facts.hidden))

    def answer_head(self, rows: int, picks: int, reverse: bool = False) -> nn.Module | None:
        """Returns a lowered `SoftmaxHead` where `lowers_softmax`, otherwise `head`. reverse: for a reverse pass."""
        if not lowers_softmax(self.recipe, rows * picks, self.facts.vocabulary):
            return self.head(rows, picks)
        values, scales = self.backbone.head_table()
        product = HeadReverse(values) if reverse else None
        layer = SoftmaxHead(self._head_layer(), product, self.facts.final_softcap)
        inputs = () if product is None or scales is None else (scales,)
        return self._lowered_head(layer, self.part_of(rows, picks, self.facts.hidden), *inputs)

    def _head_layer(self) -> HeadLayer:
        values, scales = self.backbone.head_table()
        return HeadLayer(values, None if scales is None else scales.squeeze(1))

    def _lowered_head(self, layer: nn.Module, *example: Tensor) -> nn.Module:
        return self._lower([LayerGroup([layer], example, ROWS)])[0][0]

    def part_of(self, rows: int, picks: int, width: int) -> Tensor:
        """Returns zeros with the shape of one part of (rows, picks, width); see `Network.in_parts`."""
        part = logits_part(rows * picks, self.facts.vocabulary)
        return torch.zeros(*((rows, picks) if part == rows * picks else (1, part)), width)

    def methods(self) -> dict[str, Signature]:
        """Returns every method of the program with its example inputs, as listed in `shared.program`."""
        recipe, backbone, size = self.recipe, self.backbone, self.size
        q, e, s = recipe.queries, recipe.effective_batch, recipe.sequence_length
        t, c, r = recipe.answer_length, recipe.choices, recipe.score_rows
        frozen = recipe.frozen_layers(self.facts.layers)
        head = self.answer_head(r, t)
        below, above = slice(0, frozen), slice(frozen, None)
        answers = recipe.perturbed == "answers"
        adapted = self.stack(r, recipe.paths, above, kind=KeyedLayer if answers else DecoderLayer)
        answer_pass = self.answer_pass(above) if answers else None
        once = [self.stack(e, 1, below, adapted=False)] if frozen else []  # on E sequences
        every = [self.stack(r, 1, below, adapted=False)] if frozen else []  # on R sequences
        step = Step(
            recipe,
            size,
            backbone,
            head if not answers else self.answer_head(e * recipe.answer_paths, t),
            *once,
            adapted,
            answer_pass=answer_pass,
        )
        inputs = StepInputs.example(recipe, size).flat
        replayed: Example = (zero_seeds(q), torch.zeros(q), *([torch.ones(1)] if recipe.estimator == "stored" else []))
        length = {0: {1: Dim("S", min=MIN_LENGTH, max=s)}} if self.dynamic_length else {}
        methods = {
            "step": Signature(step, (zero_tokens(e, s), *inputs), length),
            "replay": Signature(Replay(recipe, size), replayed),
            "score": Signature(
                Score(recipe, size, backbone, head, *every, adapted),
                (zero_tokens(r, s), zero_tokens(r, t), zero_tokens(r, t, c)),
                length,
            ),
            "adapter": Signature(Adapter(recipe, size), ()),
            "load": Signature(Load(recipe, size), (torch.zeros(size),)),
        }
        if frozen:
            hidden = torch.zeros(e, s, self.facts.hidden)
            methods["prefix"] = Signature(Prefix(recipe, size, backbone, head, *once), (zero_tokens(e, s),), length)
            suffix = Suffix(recipe, size, backbone, step.head, adapted, answer_pass=answer_pass)
            methods["suffix"] = Signature(suffix, (hidden, *inputs), length)
            methods["score_suffix"] = score_suffix(
                ScoreSuffix(recipe, size, backbone, head, adapted), self.facts.hidden, length
            )
        if recipe.noise == "randn":
            del methods["replay"]  # its directions would differ from those of the step
        if recipe.estimator == "stored":
            methods["flush"] = Signature(Flush(recipe, size), ())
        return methods


def score_suffix(module: ScoreSuffix, hidden: int, length: Mapping[int, Mapping[int, Dim]]) -> Signature:
    """Returns the method `score_suffix`. hidden: the base's hidden size. length: the dynamic S."""
    recipe = module.recipe
    r, t = recipe.score_rows, recipe.answer_length
    states = torch.zeros(r, recipe.sequence_length, hidden)
    return Signature(module, (states, zero_tokens(r, t), zero_tokens(r, t, recipe.choices)), length)


def lower_by_shape(
    lower: Lower, layers: Sequence[nn.Module], shapes: Sequence[LayerShape], example: Callable[[LayerShape], Example]
) -> list[nn.Module]:
    """Lowers every layer; layers of one shape share a graph. example: returns the export inputs of a shape."""
    by_shape: dict[LayerShape, list[nn.Module]] = {}
    for layer, shape in zip(layers, shapes, strict=True):
        by_shape.setdefault(shape, []).append(layer)
    lowered = lower([LayerGroup(alike, example(shape), shape.scheme) for shape, alike in by_shape.items()])
    following = {shape: iter(delegates) for shape, delegates in zip(by_shape, lowered, strict=True)}
    return [next(following[shape]) for shape in shapes]


def layer_example(shape: LayerShape, length: int) -> Example:
    """Returns the export inputs of one `DecoderLayer`."""
    facts = shape.facts
    slab = (torch.zeros(shape.paths, shape.slab),) if shape.targets else ()
    vectors = [torch.ones(facts.hidden) for _ in facts.layer_norms]
    heads = [torch.ones(size) for size in facts.mixer_vectors.values()]
    tables, positions = all_tables(facts, length)[-1 if facts.convolves else 0], None
    if shape.picks:
        positions = zero_tokens(shape.rows, shape.picks)
    states = states_for(shape, torch.zeros(shape.rows, length, facts.hidden), positions)
    own = tables(length, shape.rows) if positions is None else tables.picked(length, positions)
    return (*states, *slab, *vectors, *heads, *own)
