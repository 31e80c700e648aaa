"""A stock transformers model whose adapted linear layers run one LoRA-B per path. Every PyTorch baseline trains it.

Inputs and the layout of flat B are those of a program (`shared.program`, `shared.zo.lora`). So a baseline and a program
take the same batches, start from the same A, and can be compared loss by loss. Works with or without autograd.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bench.programs import model_file
from shared.recipe import Recipe
from shared.zo.calibration import Calibration
from shared.zo.lora import BaseShape, flat_size, frozen_a, lora_modules

EXCLUDED = -1e9  # the logit of a padded choice


def load_model() -> Any:
    """Loads SmolLM2-135M as transformers' AutoModelForCausalLM, float32, in evaluation mode."""
    path = model_file()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32").eval()


class AdaptedModel:
    """MP-LoRA (the paper's equation in 3.1, Y = XW + (XA) B by path) by forward hooks."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape, calibration: Calibration | None = None) -> None:
        """model: transformers' AutoModelForCausalLM; its weights are frozen in place."""
        self.model = model.eval().requires_grad_(False)
        self.upper: Any = None  # runs hidden states of a prefix; see `split_backbone`
        self.recipe, self.shape = recipe, shape
        self.size = flat_size(recipe, shape)
        self.dtype = model.lm_head.weight.dtype
        self._paths = self.zeros().unsqueeze(0)
        layers = dict(model.named_modules())
        self._handles = []
        for module in lora_modules(recipe, shape):
            a = torch.from_numpy(frozen_a(recipe, module, calibration)) * recipe.scale  # (in, r)
            hook = self._hook(a.to(self.dtype), module.offset, module.size)
            self._handles.append(layers[module.name].register_forward_hook(hook))

    def remove(self) -> None:
        """Removes the hooks; the model is the stock one again."""
        for handle in self._handles:
            handle.remove()

    def zeros(self) -> Tensor:
        """Returns B = 0, float32 (D,)."""
        return torch.zeros(self.size)

    def losses(self, batch: tuple[np.ndarray, ...], paths: Tensor) -> Tensor:
        """Returns the mean negative log-likelihood of the answers under each B of `paths` (n, D): float32 (n,).

        batch: from `shared.zo.encoding.pack_step`, for the recipe's loss. Hidden states (E, S, hidden) that enter the
        layers of `upper` may stand in place of its tokens (E, S).
        """
        n = len(paths)
        tokens, positions, *labels, mask = (torch.from_numpy(array) for array in batch)
        inputs = tokens.repeat(n, *(1 for _ in tokens.shape[1:]))
        answers = self._answers(inputs, positions.repeat(n, 1), paths)  # (n*E, T, hidden)
        if self.recipe.loss == "full":
            logits, (truth,) = self.model.lm_head(answers), labels
            nll = -torch.log_softmax(logits.float(), -1).gather(2, truth.repeat(n, 1).unsqueeze(2)).squeeze(2)
        else:
            choices, choice_mask = labels
            heads = self.model.lm_head.weight[choices].repeat(n, 1, 1, 1)  # (n*E, T, C, hidden)
            logits = (heads @ answers.unsqueeze(3)).squeeze(3).float()
            nll = -torch.log_softmax(logits.masked_fill(choice_mask.repeat(n, 1, 1) == 0, EXCLUDED), -1)[:, :, 0]
        return (nll.reshape(n, -1) * mask.reshape(1, -1)).sum(1) / mask.sum().clamp(min=1)

    @torch.no_grad()
    def score(self, inputs: tuple[np.ndarray, ...], b: Tensor) -> np.ndarray:
        """Returns log-probabilities (R, T, C) over the whole vocabulary under B (D,), like a program's `score`."""
        tokens, positions, choices = (torch.from_numpy(array) for array in inputs)
        logits = self.model.lm_head(self._answers(tokens, positions, b.unsqueeze(0)))
        scores: np.ndarray = torch.log_softmax(logits.float(), -1).gather(2, choices).numpy()
        return scores

    def _answers(self, tokens: Tensor, positions: Tensor, paths: Tensor) -> Tensor:
        """Returns final hidden states (R, T, hidden) at `positions` (R, T) of tokens (R, S); R is split by path."""
        self._paths = paths.to(self.dtype)
        if tokens.is_floating_point():
            hidden = self.upper(inputs_embeds=tokens, use_cache=False).last_hidden_state
        else:
            hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        answers: Tensor = hidden[torch.arange(len(hidden)).unsqueeze(1), positions]
        return answers

    def _hook(self, a: Tensor, offset: int, size: int) -> Any:
        def add_lora(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            paths = self._paths[:, offset : offset + size].reshape(len(self._paths), self.recipe.rank, -1)
            low = (inputs[0] @ a).reshape(len(self._paths), -1, self.recipe.rank)  # (n, E*S, r)
            return output + torch.bmm(low, paths).reshape(output.shape)

        return add_lora


def split_backbone(backbone: Any, layer: int) -> tuple[Any, Any]:
    """Returns transformers' decoder below a layer, without the final norm, and from that layer on; weights shared."""
    below, above = copy.copy(backbone), copy.copy(backbone)
    for part, layers in ((below, backbone.layers[:layer]), (above, backbone.layers[layer:])):
        part._modules = dict(part._modules)
        part.layers = layers
    below.norm = nn.Identity()
    return below, above
