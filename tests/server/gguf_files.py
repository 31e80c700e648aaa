"""GGUF files by llama.cpp's published converter: its names and forms of tensors, of tiny models and of the real one."""

import math
import zlib

import gguf
import numpy as np

# Fields that the writer sets itself.
OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
PERMUTED = ("llama", "smollm3", "granite", "arcee", "mistral", "ministral3")
NUMBERS = {  # of config.json, by the writer's methods
    "add_block_count": ("num_hidden_layers",),
    "add_context_length": ("max_position_embeddings",),
    "add_embedding_length": ("hidden_size",),
    "add_head_count": ("num_attention_heads",),
    "add_layer_norm_rms_eps": ("rms_norm_eps", "norm_eps"),
    "add_layer_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "add_sliding_window": ("sliding_window",),
    "add_attn_logit_softcapping": ("attn_logit_softcapping",),
    "add_final_logit_softcapping": ("final_logit_softcapping",),
    "add_attention_scale": ("attention_multiplier",),
    "add_embedding_scale": ("embedding_multiplier",),
    "add_residual_scale": ("residual_multiplier",),
    "add_logit_scale": ("logits_scaling", "logit_scale"),
    "add_parallel_residual": ("use_parallel_residual",),
    "add_shortconv_l_cache": ("conv_L_cache",),
}
# Scales of a block and their bytes, for weights around zero of one size.
K_SCALES = {
    "Q2_K": {80: 2e-3, 82: 3e-3},
    "Q3_K": {108: 3e-4},
    "Q4_K": {0: 1e-4, 2: 8e-4},
    "Q5_K": {0: 5e-5, 2: 8e-4},
    "Q6_K": {208: 1e-5},
}


def quantized(values, kind):
    """A matrix in blocks. `gguf` reads K quants and makes none: then random blocks, the same for the same row."""
    if kind.name not in K_SCALES:
        return gguf.quantize(values, kind)
    size, width = gguf.GGML_QUANT_SIZES[kind]
    shape = values.shape[1] // size, width
    seeds = [zlib.crc32(row) for row in values]
    rows = np.stack([np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8) for seed in seeds])
    for byte, scale in K_SCALES[kind.name].items():
        rows[..., byte : byte + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return rows.reshape(len(values), -1)


def write_gguf(model, architecture, path, kind=gguf.GGMLQuantizationType.F32, add=lambda writer: None, vocabulary=True):
    """A model, with a vocabulary of its size. kind: of tensors whose rows are whole blocks. add: writes more."""
    config = model.config.get_text_config()
    model_type = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    for method, names in NUMBERS.items():
        values = (getattr(config, name, None) for name in names)
        if (value := next((value for value in values if value is not None), None)) is not None:
            getattr(writer, method)(value)
    if model_type not in ("gpt_neox", "gpt2"):
        kinds = config.layer_types if model_type == "lfm2" else []
        heads = [0 if kind == "conv" else config.num_key_value_heads for kind in kinds]
        writer.add_head_count_kv(heads or config.num_key_value_heads)
    adjusted = model.state_dict().get("model.layers.0.feed_forward.w1.weight", np.empty(0))  # of lfm2
    width = len(adjusted) or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    writer.add_feed_forward_length(width)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if model_type != "gpt2":
        rope = config.rope_parameters
        if model_type == "gemma3_text":
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
        writer.add_rope_dimension_count(rotated)
        if rope["rope_type"] == "longrope":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if "attention_factor" in rope:
                writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if model_type == "ministral3":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if vocabulary:
        write_vocabulary(writer, config.vocab_size)
    add(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and model.config.tie_word_embeddings) or "vision" in name or "multi_modal" in name:
            continue
        stem, _, ending = name.replace("language_model.", "").rpartition(".")
        values = np.ascontiguousarray(as_llama_cpp(config, model_type, name, tensor.numpy()))
        whole = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", quantized(values, stored), raw_dtype=stored)
    return finish(writer, path)


def as_llama_cpp(config, model_type, name, values):
    """A tensor of transformers in the form of llama.cpp."""
    heads = config.num_attention_heads
    if model_type in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = heads if "q_proj" in name else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if name.endswith("norm.weight") and model_type in ("gemma", "gemma2", "gemma3_text", "nemotron"):
        return values + 1
    if "query_key_value" in name:  # from head to head, and here queries, keys and values
        return values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if "conv.conv" in name:
        return values[:, 0]
    return values.T if model_type == "gpt2" and ".c_" in name and values.ndim == 2 else values


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


def rewrite(source, path, kind=gguf.GGMLQuantizationType.F32):
    """The model of a GGUF file with its matrices in another format."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(OWN_FIELDS):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, stored), raw_dtype=stored)
    return finish(writer, path)


def finish(writer, path):
    """Writes all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
