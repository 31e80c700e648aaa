"""A stock transformers model in PyTorch."""

from typing import Any

from transformers import AutoModelForCausalLM

from server.compiler.checkpoints.base import locate_base


def load_model(base: str) -> Any:
    """Loads transformers' AutoModelForCausalLM in float32 from a directory, .gguf file or id, in evaluation mode."""
    files = locate_base(base)
    root, options = files.root, {}
    if files.form == "gguf":
        root, options = files.root.parent, {"gguf_file": files.root.name}
    return AutoModelForCausalLM.from_pretrained(root, dtype="float32", **options).eval()
