"""Stock `peft` on the stock model gives the answers that the compiled program gives."""

import subprocess
import sys

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from transformers import LlamaForCausalLM

from server.compiler.checkpoints.checkpoint import inspect_base
from server.compiler.program import compile_program
from shared.errors import InvalidRecipe
from shared.program_inputs import TOKEN_DTYPE
from shared.zo.calibration import CalibrationMetadata, dump_calibration, load_calibration
from shared.zo.lora import lora_modules
from tests.server.compiler.conftest import compile_to, token_batch
from tests.server.peft_directory import write_peft


def check_answers(program, stock, directory, atol=0.0001, calibration=None):
    """`score`'s log-probabilities with a random adapter are those of the stock model with PEFT's adapter."""
    recipe, shape = program.manifest.recipe, program.manifest.shape
    flat = program.load_some_b(0.02)
    write_peft(recipe, shape, flat, program.manifest.a_sha256, directory, calibration)
    model = peft.PeftModel.from_pretrained(stock, directory).eval()
    assert sum(name.endswith("lora_B.default") for name, _ in model.named_modules()) == len(lora_modules(recipe, shape))
    rng, (rows, t, c) = np.random.default_rng(11), (recipe.score_rows, recipe.answer_length, recipe.choices)
    tokens = token_batch(rng, rows, recipe.sequence_length, vocabulary=shape.vocabulary)
    positions = rng.integers(0, recipe.sequence_length, (rows, t)).astype(TOKEN_DTYPE)
    choices = token_batch(rng, rows, t, c, vocabulary=shape.vocabulary)
    theirs = log_probabilities(model, tokens, positions, choices)
    with model.disable_adapter():
        plain = log_probabilities(model, tokens, positions, choices)
    assert np.abs(theirs - plain).max() > 0.01  # the adapter does something
    np.testing.assert_allclose(program("score", tokens, positions, choices)[0], theirs, rtol=0, atol=atol)


@torch.no_grad()
def log_probabilities(model, tokens, positions, choices):
    logits = model(torch.from_numpy(tokens.astype(np.int64))).logits
    position_logits = logits[torch.arange(len(tokens))[:, None], torch.from_numpy(positions.astype(np.int64))]
    return torch.log_softmax(position_logits, -1).gather(2, torch.from_numpy(choices.astype(np.int64))).numpy()


@pytest.mark.slow
def test_stock_peft_gives_the_answers_of_a_calibrated_program(tiny, tmp_path):
    """A program whose A is from a calibration."""
    recipe = tiny.recipe(queries=1, targets=("v_proj", "down_proj"))
    random, directions = np.random.default_rng(2), {}
    for module in lora_modules(recipe, inspect_base(str(tiny.directory))):
        directions[module.name] = np.linalg.qr(random.normal(size=(module.in_features, 6)))[0].astype(np.float32)
    metadata = CalibrationMetadata(base=recipe.base, kind="gradients", task="sst2", examples=4)
    calibration = load_calibration(dump_calibration(metadata, directions))
    calibrated_recipe = recipe.model_copy(update={"calibration": calibration.sha256})
    with pytest.raises(InvalidRecipe, match="is not available"):
        compile_program(calibrated_recipe, str(tiny.directory), tmp_path / "program")
    program = compile_to(tmp_path / "program", calibrated_recipe, str(tiny.directory), calibration=calibration)
    stock = LlamaForCausalLM.from_pretrained(tiny.directory)
    check_answers(program, stock, tmp_path / "adapter", calibration=calibration)
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
    a = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")[name]
    np.testing.assert_allclose(a @ a.T, np.eye(4) / 3, atol=1e-6)


def test_writing_needs_no_torch():
    check = "import sys, server.registry.exports.gguf, server.registry.exports.peft; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
