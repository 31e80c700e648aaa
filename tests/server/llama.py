"""A tiny Llama with random weights, as Hugging Face's directories hold one: a base for the real compiler."""

import json

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.server.homes import WORDS

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


def write_llama(directory):
    """A Hugging Face directory with random weights."""
    directory.mkdir()
    random = np.random.default_rng(0)
    hidden, inner, keys = CONFIG["hidden_size"], CONFIG["intermediate_size"], 8
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        shapes |= {
            f"{root}.self_attn.q_proj.weight": (hidden, hidden),
            f"{root}.self_attn.k_proj.weight": (keys, hidden),
            f"{root}.self_attn.v_proj.weight": (keys, hidden),
            f"{root}.self_attn.o_proj.weight": (hidden, hidden),
            f"{root}.mlp.gate_proj.weight": (inner, hidden),
            f"{root}.mlp.up_proj.weight": (inner, hidden),
            f"{root}.mlp.down_proj.weight": (hidden, inner),
            f"{root}.input_layernorm.weight": (hidden,),
            f"{root}.post_attention_layernorm.weight": (hidden,),
        }
    tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(("[UNK]", *WORDS))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
