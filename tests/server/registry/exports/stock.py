"""Tiny random models as transformers and llama.cpp hold them, and what each makes of an adapter.

The GGUF files follow llama.cpp's published converter: its tensor names, its order of a Llama's query and key rows, and
Gemma's norms with their one added.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import peft
import torch
import xllamacpp
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from server.compiler import inspect_base
from shared.recipe import TARGETS, BaseRef, Recipe
from shared.zo.lora import BaseShape, a_fingerprint, flat_size
from tests.server.compiler import conftest as compiler

GROUPED = {**compiler.GROUPED, "initializer_range": 0.3}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gemma3_text": Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=64,
        rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE},
    ),
    "gemma3_text-deep": Gemma3TextConfig(  # its sixth layer sees everything, the others four tokens
        **(GROUPED | {"num_hidden_layers": 7}),
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=4,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": ROPE | {"rope_theta": 500.0}, "sliding_attention": ROPE},
    ),
    "opt": OPTConfig(**compiler.SMALL, ffn_dim=48, init_std=0.3),
}
# All linear layers, odd subsets of them and of the decoder layers, ranks that are no multiple of 8.
ADAPTED = {
    "llama": {"targets": TARGETS, "rank": 4},
    "llama-tied": {"targets": ("q_proj", "k_proj"), "rank": 3, "layers": (0, 2)},
    "qwen2": {"targets": ("k_proj", "v_proj", "down_proj"), "rank": 5, "layers": "last:1"},
    "qwen3": {"targets": TARGETS, "rank": 3, "layers": (0, 2)},
    "gemma3_text": {"targets": TARGETS, "rank": 8, "alpha": 64},
    "opt": {"targets": tuple(target for target in TARGETS if target != "gate_proj"), "rank": 3},
}
LLAMA_CPP = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


@dataclass(frozen=True)
class Base:
    """A random model in a directory, an adapter's recipe for it, and a random B."""

    directory: Path
    recipe: Recipe
    shape: BaseShape
    flat: np.ndarray

    @property
    def a_sha256(self):
        return a_fingerprint(self.recipe, self.shape)

    def model(self):
        """A fresh copy of the stock model, float32."""
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()


def make_base(directory, name):
    """Writes a random model of one of CONFIGS, its norms and biases random, too."""
    torch.manual_seed(3)
    compiler.write_base(directory, AutoModelForCausalLM.from_config(CONFIGS[name]))
    return adapted(directory, str(directory), ADAPTED.get(name, {"targets": TARGETS, "rank": 2}))


def adapted(directory, source, settings):
    """A recipe and a random B for the base at `source`."""
    facts = inspect_base(source)
    small = {"answer_length": 1, "choices": 1, "a_seed": 7}
    recipe = Recipe(base=BaseRef(name="tiny", sha256=facts.sha256), **(small | settings))
    shape = BaseShape(**{field: getattr(facts, field) for field in BaseShape.model_fields})
    flat = 0.3 * np.random.default_rng(5).standard_normal(flat_size(recipe, shape)).astype(np.float32)
    return Base(directory, recipe, shape, flat)


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


def write_gguf(base, path):
    """The base as a float32 GGUF file with a vocabulary of its size."""
    model = base.model()
    config, architecture = model.config, LLAMA_CPP[base.shape.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(base.shape.head_dim)
    writer.add_value_length(base.shape.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "llama":
        writer.add_rope_dimension_count(base.shape.head_dim)
    rope = config.rope_parameters
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    write_vocabulary(writer, config.vocab_size)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, ending = name.rpartition(".")
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(writer, size):
    """Words of no meaning: prompts are given as tokens."""
    special = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"w{number}" for number in range(size)])
    writer.add_token_scores([-float(number) for number in range(size)])
    writer.add_token_types([*special, *[gguf.TokenType.NORMAL] * (size - len(special))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


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
