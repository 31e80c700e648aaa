"""MobiZO (paper, Algorithm 1) on the stock transformers model with plain PyTorch LoRA, one path at a time.

Independent of the compiler: no batching of paths, no graph noise, no decoder of ours.
"""

import copy
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from shared.program_inputs import TOKEN_DTYPE
from shared.zo.lora import file_rows, hf_module_name, init_a, lora_modules
from shared.zo.noise import direction


@dataclass(frozen=True)
class Batch:
    """One step's examples. choices[..., 0] is the true token."""

    tokens: np.ndarray  # (E, S)
    positions: np.ndarray  # (E, T)
    choices: np.ndarray  # (E, T, C)
    choice_mask: np.ndarray  # (E, T, C)
    mask: np.ndarray  # (E, T)


def random_batch(rng, recipe, vocabulary):
    """Random examples; the first has a padded candidate, the second a shorter answer. E is at least 2."""
    e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
    choice_mask, mask = np.ones((e, t, c), np.float32), np.ones((e, t), np.float32)
    choice_mask[0, :, -1] = 0
    mask[1, 1:] = 0
    positions = np.sort(np.stack([rng.choice(s - 1, t, replace=False) for _ in range(e)]), axis=1)
    tokens, choices = rng.integers(0, vocabulary, (e, s)), rng.integers(0, vocabulary, (e, t, c))
    integers = [array.astype(TOKEN_DTYPE) for array in (tokens, positions, choices)]
    return Batch(*integers, choice_mask, mask)


def select_rows(batch, rows):
    """A batch of other rows of the batch; None: an absent example, as `pack_step` leaves one."""
    indices = [0 if row is None else row for row in rows]
    sampled = Batch(*(getattr(batch, name)[indices].copy() for name in Batch.__dataclass_fields__))
    for at, row in enumerate(rows):
        if row is None:
            sampled.tokens[at], sampled.positions[at], sampled.choices[at], sampled.mask[at] = 0, 0, 0, 0
            sampled.choice_mask[at] = np.eye(sampled.choice_mask.shape[2], dtype=np.float32)[0]
    return sampled


def labels(recipe, batch):
    """What a program's step takes of the answers."""
    return (batch.choices, batch.choice_mask) if recipe.loss == "candidates" else (batch.choices[..., 0],)


@torch.no_grad()
def round_weights(model):
    """A copy whose tables and linear weights are rounded to 8 bits, one scale a row."""
    model = copy.deepcopy(model)
    by_column = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith(("positions.weight", "wpe.weight")):
            scale = parameter.abs().amax(dim=0 if name in by_column else 1, keepdim=True) / 127
            parameter.copy_(torch.round(parameter / scale) * scale)
    return model


def adapt(model, shape, module, added):
    """Adds added(x) to the output of a target of `model`, which may be some rows of a fused one. Returns the handle."""
    kind = shape.of_layer(module.layer)
    stem, rows = file_rows(kind, module.target)

    def add(_, inputs, output):
        more = added(inputs[0])
        return output + more if rows is None else output.index_add(-1, torch.from_numpy(rows), more)

    path = module.name.removesuffix(hf_module_name(kind, module.target)) + stem
    return model.get_submodule(path).register_forward_hook(add)


@contextmanager
def lora(model, recipe, shape, flat):
    """`model` with y = W x + (alpha / r) x A B on the recipe's targets; B is the flat vector (D,)."""
    whole = torch.as_tensor(flat)
    handles = []
    for module in lora_modules(recipe, shape):
        a = torch.from_numpy(init_a(recipe, module))
        b = whole[module.offset : module.offset + module.size].view(module.rank, module.out_features)
        handles.append(adapt(model, shape, module, lambda x, a=a, b=b: (recipe.alpha / recipe.rank) * (x @ a @ b)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient(model, recipe, shape, flat, batch):
    """The recipe's loss at B and its gradient (D,) by autograd."""
    b = torch.from_numpy(flat.copy()).requires_grad_()
    mean = mean_loss(answer_logits(model, recipe, shape, b, batch), recipe, batch)
    (gradient,) = torch.autograd.grad(mean, b)
    return np.float32(mean.detach()), gradient.numpy()


def answer_logits(model, recipe, shape, flat, batch):
    """Logits (E, T, V) that predict the answer tokens."""
    with lora(model, recipe, shape, flat):
        logits = model(torch.from_numpy(batch.tokens.astype(np.int64))).logits
    return logits[torch.arange(len(batch.tokens))[:, None], torch.from_numpy(batch.positions.astype(np.int64))]


@torch.no_grad()
def scores(model, recipe, shape, flat, tokens, positions, choices):
    """Log-probabilities (rows, T, C) of the choices."""
    ones = np.ones(choices.shape, np.float32)
    logits = answer_logits(model, recipe, shape, flat, Batch(tokens, positions, choices, ones, ones[..., 0]))
    return torch.log_softmax(logits, -1).gather(2, torch.from_numpy(choices.astype(np.int64))).numpy()


@torch.no_grad()
def loss(model, recipe, shape, flat, batch):
    """The recipe's loss of one path, a mean over answer tokens."""
    return np.float32(mean_loss(answer_logits(model, recipe, shape, flat, batch), recipe, batch))


def mean_loss(logits, recipe, batch):
    """The recipe's loss of logits (E, T, V), a mean over answer tokens."""
    choices = torch.from_numpy(batch.choices.astype(np.int64))
    if recipe.loss == "candidates":
        choice_logits = logits.gather(2, choices).masked_fill(torch.from_numpy(batch.choice_mask) == 0, -torch.inf)
        nll = torch.logsumexp(choice_logits, dim=-1) - choice_logits[..., 0]
    else:
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), choices[..., 0], reduction="none")
    mask = torch.from_numpy(batch.mask)
    return (nll * mask).sum() / max(float(mask.sum()), 1.0)


def step(model, recipe, shape, flat, batch, seeds, lr, eps):
    """One step: losses (2q,) with the minus paths after the plus paths, coefficients (q,), and the new B (D,)."""
    z = [direction(recipe.noise, (int(k0), int(k1)), flat.size) for k0, k1 in seeds]
    plus = [loss(model, recipe, shape, flat + np.float32(eps) * zi, batch) for zi in z]
    minus = [loss(model, recipe, shape, flat - np.float32(eps) * zi, batch) for zi in z]
    losses = np.array(plus + minus, np.float32)
    gradients = (losses[: len(z)] - losses[len(z) :]) / (2 * eps)
    coefficients = (lr / len(z) * gradients).astype(np.float32)
    for coefficient, zi in zip(coefficients, z, strict=True):
        flat = flat - coefficient * zi
    return losses, coefficients, flat
