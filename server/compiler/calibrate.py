"""Computes a calibration (`shared.zo.calibration`) from gradients or activations of the transformers model.

For each linear layer it accumulates a Gram matrix (in, in) and stores the leading eigenvectors. Kind gradients: the sum
over batches of G^T G, where G (out, in) is the gradient of a batch's mean loss with respect to the weight; the
eigenvectors are the right singular vectors of the stacked gradients. Kind activations: the sum over tokens of x x^T. A
gradient is held only during its layer's backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFiles, locate_base
from server.compiler.checkpoints.checkpoint import inspect_base
from server.compiler.checkpoints.transformers_names import stock_config, stock_tensors
from shared.errors import InvalidDataset, UnreadableCheckpoint, UnsupportedModel
from shared.recipe import Recipe
from shared.zo.calibration import F32, CalibrationAbout, Kind, dump_calibration
from shared.zo.encoding import Example, pack_step
from shared.zo.lora import LoraModule, lora_modules

Progress = Callable[[str, float], None]

_EXCLUDED = -1e9  # logit of a padded choice
_NOTHING = 1e-12  # eigenvalues below this share of the largest are rounding errors of squared float32 gradients


def calibrate(
    source: str,
    recipe: Recipe,
    kind: Kind,
    task: str,
    examples: Sequence[Example],
    progress: Progress | None = None,
) -> bytes:
    """Returns the calibration file of the base at `source`, computed from `examples` in order, E at a time.

    recipe: selects targets and layers, with `rank` directions each (at most the number of inputs of the layer), and
    gives the loss, E and S of the gradients and the base named in the file. task: name recorded in the file.
    progress: called with the name of a stage and the fraction done, 0 to 1.
    Memory: the base in float32 and 8 in^2 bytes per module. Raises UnknownBase, UnreadableCheckpoint,
    UnsupportedModel, InvalidRecipe, or InvalidDataset if the examples span too few directions.
    """
    report = progress or (lambda stage, fraction: None)
    report("read", 0.0)
    facts = inspect_base(source)
    modules = lora_modules(recipe, facts)
    grams = _Grams(_stock_model(source), modules, kind, recipe, facts.final_softcap)
    batches = [examples[at : at + recipe.effective_batch] for at in range(0, len(examples), recipe.effective_batch)]
    for number, batch in enumerate(batches):
        report("examples", number / len(batches))
        grams.add(batch)
    directions = {}
    for number, module in enumerate(modules):
        report("directions", number / len(modules))
        directions[module.name] = _leading(grams.take(module.name), min(recipe.rank, module.in_features), module.name)
    report("directions", 1.0)
    return dump_calibration(
        CalibrationAbout(base=recipe.base, kind=kind, task=task, examples=len(examples)), directions
    )


class _Grams:
    """A transformers model that accumulates the Gram matrices of the selected linear layers."""

    def __init__(
        self, model: Any, modules: Sequence[LoraModule], kind: Kind, recipe: Recipe, softcap: float | None
    ) -> None:
        self._model, self._recipe, self._softcap = model, recipe, softcap
        self._real = torch.empty(0)
        self._sums: dict[str, Tensor] = {}
        layers = dict(model.named_modules())
        for module in modules:
            if module.name not in layers:
                raise UnsupportedModel(f"transformers' model of this base has no {module.name}")
            size = module.in_features
            self._sums[module.name] = torch.zeros(size, size, dtype=torch.float64)
            hook = self._of_gradients(module.name) if kind == "gradients" else self._of_inputs(module.name)
            layers[module.name].register_forward_hook(hook)
        self._backward = kind == "gradients"

    def add(self, batch: Sequence[Example]) -> None:
        """Runs one batch of at most E examples."""
        tokens, positions, *labels, mask = (
            torch.from_numpy(array) for array in pack_step(batch, self._recipe, dynamic=True)
        )
        lengths = torch.zeros(len(tokens), 1)
        lengths[: len(batch), 0] = torch.tensor([len(example.right.tokens) for example in batch])
        self._real = (torch.arange(tokens.shape[1]) < lengths).reshape(-1)  # (E S,): not padding
        with torch.set_grad_enabled(self._backward):
            hidden = self._model.base_model(tokens, use_cache=False).last_hidden_state
            if self._backward:
                answers = hidden[torch.arange(len(hidden)).unsqueeze(1), positions]  # (E, T, hidden)
                self._loss(answers, labels, mask).backward()

    def take(self, name: str) -> Tensor:
        """Returns and releases the Gram matrix of a module, float64 (in, in)."""
        return self._sums.pop(name)

    def _loss(self, answers: Tensor, labels: list[Tensor], mask: Tensor) -> Tensor:
        """Returns the mean negative log-likelihood of the answer tokens, as a program's step computes it with B = 0."""
        head = self._model.get_output_embeddings().weight
        if self._recipe.loss == "full":
            logits, truth = self._capped(answers @ head.T), labels[0]
        else:
            choices, choice_mask = labels
            logits = self._capped((head[choices] @ answers.unsqueeze(3)).squeeze(3))  # (E, T, C)
            logits = logits.masked_fill(choice_mask == 0, _EXCLUDED)
            truth = torch.zeros_like(choices[:, :, 0])
        nll = -torch.log_softmax(logits, -1).gather(2, truth.unsqueeze(2)).squeeze(2)
        return (nll * mask).sum() / mask.sum()

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def _of_gradients(self, name: str) -> Any:
        def forward(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2)  # (tokens, in)

            def backward(delta: Tensor) -> None:
                gradient = (delta.flatten(0, -2).T @ x).double()  # (out, in)
                self._sums[name].addmm_(gradient.T, gradient)

            # The weights are frozen, so autograd records nothing below the first selected layer.
            if not output.requires_grad:
                output.requires_grad_()
            output.register_hook(backward)

        return forward

    def _of_inputs(self, name: str) -> Any:
        def forward(_module: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            x = inputs[0].flatten(0, -2)[self._real].double()  # (tokens, in)
            self._sums[name].addmm_(x.T, x)

        return forward


def _leading(gram: Tensor, width: int, name: str) -> F32:
    """Returns the leading eigenvectors of a Gram matrix (in, in), float32 (in, width), strongest first."""
    values, vectors = torch.linalg.eigh(gram)
    if not values[-1].isfinite() or values[-width] <= _NOTHING * values[-1]:
        raise InvalidDataset(
            f"the examples span fewer than {width} directions of {name}; use more examples or a smaller width"
        )
    top = vectors[:, -width:].flip(1).numpy()
    signs = np.sign(top[np.abs(top).argmax(0), np.arange(width)])  # an eigenvector's own sign is arbitrary
    directions: F32 = (top * signs).astype(np.float32)
    return directions


def _stock_model(source: str) -> Any:
    """Loads a base with transformers: float32, frozen, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    files = locate_base(source)
    logging.disable_progress_bar()
    try:
        model = (
            _of_gguf(files)
            if files.form == "gguf"
            else AutoModelForCausalLM.from_pretrained(files.root, dtype=torch.float32)
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UnreadableCheckpoint(f"{files.root.name} cannot be loaded by transformers ({error})") from error
    finally:
        logging.enable_progress_bar()
    return model.eval().requires_grad_(False)


def _of_gguf(files: BaseFiles) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    stock = stock_config(files)
    config = AutoConfig.for_model(stock.pop("model_type"), **stock)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in stock_tensors(files)}, strict=False)
    model.tie_weights()
    return model
