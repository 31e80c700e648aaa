"""LoRA, LoRA-FA, DoRA and VeRA from the stock `peft` package (the paper's appendix B), for MeZO.

All trainable numbers of an adapter form one flat vector, so that MeZO trains each adapter in the same way.
"""

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bench.baselines.adapted import AdaptedModel
from shared.recipe import Recipe
from shared.zo.lora import BaseShape

Variant = Literal["lora", "lora-fa", "dora", "vera"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


class PeftModel(AdaptedModel):
    """A stock model with one of peft's adapters on the recipe's targets. It takes one path at a time."""

    def __init__(self, model: Any, recipe: Recipe, shape: BaseShape, variant: Variant, vera_rank: int) -> None:
        """model: transformers' AutoModelForCausalLM. Rank, alpha, targets and seed are the recipe's."""
        super().__init__(model, recipe, shape)
        super().remove()  # the recipe's own B
        import peft  # not above: it prints warnings, also for commands that do not need it

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

    def start(self) -> Tensor:
        """Returns the adapter's own first values: float32 (D,)."""
        return parameters_to_vector(self._trained).detach().float()

    def remove(self) -> None:
        """Removes the adapter; the model is the stock one again."""
        self._wrapped.unload()

    def _answers(self, tokens: Tensor, positions: Tensor, paths: Tensor) -> Tensor:
        (path,) = paths  # one set of parameters: one path
        # A copy, since the parameters become views and the caller changes its vector.
        vector_to_parameters(path.detach().clone(), self._trained)
        return super()._answers(tokens, positions, paths)
