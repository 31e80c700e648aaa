"""Yields a base model's weights under transformers' names, and writes its configuration and tokenizer files.

It is used to write models that transformers and other standard programs load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.compiler.checkpoints.base import BaseFiles
from server.compiler.checkpoints.gguf import gguf_facts, gguf_tensors
from server.compiler.checkpoints.hf import DERIVED, LLAMA_NORMS, hf_facts, opened
from server.compiler.checkpoints.hf_config import config_facts
from server.compiler.checkpoints.tokenizer import convert_tokenizer
from shared.errors import UnreadableCheckpoint, UnsupportedModel
from shared.recipe import TARGETS
from shared.zo.lora import hf_module_name

F32 = NDArray[np.float32]
CONFIG = "config.json"
# The files of a Hugging Face model that define its tokenization.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_GGUF_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_GGUF_LAYER: dict[str, str] = {own: stock for stock, own in LLAMA_NORMS.items()}
_GGUF_LAYER |= {target: hf_module_name("llama", target) for target in TARGETS}
# The facts on which transformers' conversion of a GGUF file's metadata must agree.
_SAME = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "norm_eps", "rope", "tied")


def stock_tensors(files: BaseFiles) -> Iterator[tuple[str, F32]]:
    """Yields every weight as float32 with the name that transformers expects. Raises UnreadableCheckpoint."""
    if files.form == "gguf":
        for name, tensor in gguf_tensors(files):
            yield _from_gguf(name), tensor.numpy()
        return
    for path in (path for path in files.pinned if path.suffix == ".safetensors"):
        with opened(path) as file:
            names = [name for name in file.keys() if not DERIVED.fullmatch(name)]  # noqa: SIM118 - no mapping
        for name in names:
            with opened(path) as file:  # mapped while it is open, with the pages of one tensor
                tensor = file.get_tensor(name).float().numpy()
            yield name, tensor


def write_stock_files(files: BaseFiles, directory: Path) -> None:
    """Writes the config.json of a float32 model, and the tokenizer files. Raises as `stock_config`."""
    config = stock_config(files)
    if files.form == "gguf":
        convert_tokenizer(files).save_pretrained(directory)
    else:
        for name in TEXT_FILES:
            if (files.root / name).is_file():
                shutil.copyfile(files.root / name, directory / name)
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def stock_config(files: BaseFiles) -> dict[str, Any]:
    """Returns the contents of the config.json of a float32 model.

    Raises UnreadableCheckpoint, or UnsupportedModel if transformers reads a GGUF file's metadata differently.
    """
    if files.form == "gguf":
        config = _gguf_config(files)
    else:
        hf_facts(files)  # raises for an invalid configuration
        config = json.loads((files.root / CONFIG).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # its name before transformers 5
    config["dtype"] = "float32"
    return config


def _from_gguf(name: str) -> str:
    parts = name.split(".")
    stem = _GGUF_TOP[name] if len(parts) == 1 else f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}"
    return f"{stem}.weight"


def _gguf_config(files: BaseFiles) -> dict[str, Any]:
    """Returns the configuration as transformers converts it, which takes seconds."""
    from transformers import AutoConfig

    name = files.root.name
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(str(files.root.parent), gguf_file=name).to_dict()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableCheckpoint(f"{name} has a configuration that transformers cannot convert") from error
    facts = gguf_facts(files)
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": facts.tied,
        "vocab_size": facts.vocabulary,
    }
    theirs = {key: value for key, value in config.items() if value is not None}
    understood = config_facts(theirs)
    if wrong := [key for key in _SAME if understood[key] != getattr(facts, key)]:
        raise UnsupportedModel(f"transformers has no configuration with this GGUF file's {', '.join(wrong)}")
    return theirs
