"""A base model's facts, and where its files are: what must hold before any weight is read.

Knows directories, Hugging Face ids and GGUF files; knows nothing of recipes, programs or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.canonical import canonical_json, file_sha256, sha256_hex
from shared.errors import UnknownBase, UnreadableCheckpoint
from shared.lora import BaseShape

# The files that decide what a Hugging Face model computes and how its text becomes tokens.
PINNED_PATTERNS = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
SUPPORTED = ("llama",)


class BaseFacts(BaseShape):
    """What the compiler knows of a base model without having read its weights."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="pins the files: canonical JSON of [name, sha256] pairs")
    form: Literal["huggingface", "gguf"]
    tied: bool = Field(description="lm_head is the embedding table")
    rope_theta: float
    norm_eps: float
    parameters: int = Field(description="elements of all base tensors, tied ones once")


@dataclass(frozen=True)
class BaseFiles:
    """A base model's files on this machine."""

    form: Literal["huggingface", "gguf"]
    root: Path  # the directory, or the GGUF file itself
    pinned: tuple[Path, ...]

    @property
    def sha256(self) -> str:
        """The digest that names this base: any change of a pinned file's name or bytes changes it."""
        pairs = sorted([path.name, file_sha256(path)] for path in self.pinned)
        return sha256_hex(canonical_json(pairs))


def locate_base(source: str) -> BaseFiles:
    """The files of `source`: a directory, a .gguf file, or a Hugging Face id (downloaded into its own cache).

    Raises UnknownBase when there is nothing of that name, UnreadableCheckpoint when files are missing.
    """
    path = Path(source)
    if path.is_file():
        return BaseFiles("gguf", path, (path,))
    directory = path if path.is_dir() else _download(source)
    pinned = tuple(sorted({file for pattern in PINNED_PATTERNS for file in directory.glob(pattern)}))
    names = [file.name for file in pinned]
    if "config.json" not in names:
        raise UnreadableCheckpoint(f"{source} has no config.json; give a Hugging Face model directory or a .gguf file")
    if not any(name.endswith(".safetensors") for name in names):
        raise UnreadableCheckpoint(f"{source} has no .safetensors file; convert the weights to safetensors")
    return BaseFiles("huggingface", directory, pinned)


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(PINNED_PATTERNS)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnknownBase(f"{source} is no local directory or file and no model that can be downloaded") from error
