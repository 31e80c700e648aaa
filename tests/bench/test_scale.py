"""`bench scale`: its bases have the sizes of their names."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

with warnings.catch_warnings():  # the compiler's libraries warn of their own deprecations as they are imported
    warnings.simplefilter("ignore")

    from bench.scale.bases import SIZES


def test_the_sizes_are_those_of_their_names() -> None:
    """Parameters in millions, as the models' pages state them."""
    stated = {
        "SmolLM2-135M": 135,
        "SmolLM2-360M": 362,
        "TinyLlama-1.1B": 1100,
        "Llama-3.2-1B": 1236,
        "OPT-1.3B": 1316,
        "Qwen3-1.7B": 1721,
        "Llama2-7B": 6738,
    }
    from transformers import AutoConfig

    for name, size in SIZES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(size.model, **size.config))
        assert round(model.num_parameters() / 1e6) == pytest.approx(stated[name], rel=2e-3), name
