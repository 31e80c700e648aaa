"""Other adapters than LoRA-FA, as the stock `peft` package builds them: LoRA, DoRA and VeRA (the paper's appendix B).

All that such an adapter trains is one flat vector, so that MeZO trains each of them the same way.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.baselines.adapted import AdaptedModel
from shared.lora import BaseShape
from shared.recipe import Recipe

Variant = Literal["lora", "lora-fa", "dora", "vera"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class PeftModel(AdaptedModel):
    """A stock model with one of peft's adapters on the recipe's targets; paths go through it one at a time."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape, variant: Variant, vera_rank: int) -> None:
        """model: transformers' AutoModelForCausalLM. Rank, alpha, targets and the draw's seed are the recipe's."""
        super().__init__(model, recipe, shape)
        super().remove()  # the recipe's own B
        import peft

        common = {"target_modules": list(recipe.targets)}
        if variant == "vera":
            config = peft.VeraConfig(r=vera_rank, projection_prng_key=recipe.a_seed, **common)
        else:
            config = peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, use_dora=variant == "dora", **common)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(recipe.a_seed)
            self._wrapped = peft.get_peft_model(model, config)
        if variant == "lora-fa":
            for name, parameter in self._wrapped.named_parameters():
                parameter.requires_grad_("lora_B" in name)
        self._trained = [parameter for parameter in self._wrapped.parameters() if parameter.requires_grad]
        self.size = sum(parameter.numel() for parameter in self._trained)
        self.start = parameters_to_vector(self._trained).detach().float()

    def remove(self) -> None:
        """Takes the adapter off: the model is the stock one again."""
        self._wrapped.unload()

    def _answers(self, tokens: Tensor, positions: Tensor, paths: Tensor) -> Tensor:
        (path,) = paths  # one set of parameters: one path
        # Copied: parameters would else be views of what the caller goes on to change.
        vector_to_parameters(path.detach().clone(), self._trained)
        return super()._answers(tokens, positions, paths)
