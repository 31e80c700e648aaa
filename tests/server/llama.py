"""A tiny Llama with random weights, as Hugging Face's directories hold one: a base for the real compiler."""

import json

import numpy as np
import safetensors.numpy

from tests.server.homes import word_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_model(directory, config, spread):
    """Writes a Hugging Face directory without a tokenizer. spread: standard deviation of the weights of all layers."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linear = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in linear.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": (rng.normal(0, spread, shape) if len(shape) == 2 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def write_llama(directory):
    """A Hugging Face directory with random weights."""
    write_model(directory, CONFIG, 0.1)
    word_tokenizer().save(str(directory / "tokenizer.json"))
