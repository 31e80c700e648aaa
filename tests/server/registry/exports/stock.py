"""What transformers with peft and llama.cpp make of an adapter."""

import json
import urllib.request
from dataclasses import dataclass

import numpy as np
import peft
import torch
import xllamacpp

from server.compiler.checkpoints.checkpoint import inspect_base
from shared.recipe import BaseRef, Recipe
from shared.zo.lora import BaseShape, a_fingerprint, flat_size
from tests.server.compiler import conftest as compiler


@dataclass(frozen=True)
class Base:
    """An adapter's recipe for a base, and a random B."""

    recipe: Recipe
    shape: BaseShape
    flat: np.ndarray

    @property
    def a_sha256(self):
        return a_fingerprint(self.recipe, self.shape)


def adapted(source, settings):
    """A recipe and a random B for the base at `source`."""
    facts = inspect_base(source)
    small = {"answer_length": 1, "choices": 1, "a_seed": 7}
    recipe = Recipe(base=BaseRef(name="tiny", sha256=facts.sha256), **(small | settings))
    shape = BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})
    flat = 0.3 * np.random.default_rng(5).standard_normal(flat_size(recipe, shape)).astype(np.float32)
    return Base(recipe, shape, flat)


def prompts(count, length, vocabulary=compiler.VOCABULARY):
    """Random tokens (count, length)."""
    return np.random.default_rng(17).integers(3, vocabulary, (count, length))


@torch.no_grad()
def next_token(model, tokens):
    """Log-probabilities (rows, V) of the token that follows."""
    logits = [model(torch.from_numpy(rows)).logits[:, -1].float() for rows in np.array_split(tokens, 10)]
    return torch.log_softmax(torch.cat(logits), -1).numpy()


def with_peft(model, directory):
    """The model with the PEFT directory's adapter, as users load it."""
    return peft.PeftModel.from_pretrained(model, directory).eval()


class LlamaCpp:
    """llama.cpp with a base and adapters, whose scales a request may name.

    threads: one is fastest for a tiny model, since several wait for each other at every tensor. apply: whether the
    adapters are applied when the model is loaded; for the contrary llama-server has `--lora-init-without-apply`.
    """

    def __init__(self, base, *adapters, threads=1, apply=True):
        params = xllamacpp.CommonParams()
        params.model.path = str(base)
        params.n_ctx = 64
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = threads
        params.warmup = params.fit_params = False
        params.verbosity = -1
        # As exact as the reference: by default keys and values are kept in half precision.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0) for adapter in adapters]
        params.lora_init_without_apply = not apply
        self.server = xllamacpp.Server(params)

    def top(self, tokens, *scales):
        """The likeliest next token and its log-probability. scales: of the adapters, in order; none: as it starts."""
        request = {
            "prompt": [int(token) for token in tokens],
            "n_predict": 1,
            "n_probs": 1,
            "temperature": 0,
            "cache_prompt": False,
        }
        if scales:
            request["lora"] = [{"id": number, "scale": scale} for number, scale in enumerate(scales)]
        answer = self.server.handle_completions(request)
        likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]
        return likeliest["id"], likeliest["logprob"]

    def ask(self, path, body=None):
        """What llama-server answers to GET or, with a body, POST of a path."""
        data, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.server.listening_address}{path}", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokens(self, text, *, special):
        """The tokens of a text. special: with those that begin or end it."""
        return self.ask("/tokenize", {"content": text, "add_special": special, "parse_special": True})["tokens"]
