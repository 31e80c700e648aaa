"""A base model's facts, and where its files are: what must hold before any weight is read.

Knows directories, Hugging Face ids and GGUF files; knows nothing of recipes, programs or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.canonical import canonical_json, file_sha256, sha256_hex
from shared.errors import UnknownBase, UnreadableCheckpoint
from shared.lora import BaseShape
from shared.recipe import Target

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
VOCABULARY_FILES = ("vocab.json", "merges.txt")  # decide only where there is no tokenizer.json


class Rope(BaseModel):
    """Rotary position embedding: base frequency, and how it is stretched for long contexts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    factors: tuple[float, ...] = Field((), description="of kind factors: what divides each pair's frequency")
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class BaseFacts(BaseShape):
    """What the compiler knows of a base model without having read its weights. One decoder is shaped by them."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="pins the files: canonical JSON of [name, sha256] pairs")
    form: Literal["huggingface", "gguf"]
    tied: bool = Field(description="lm_head is the embedding table")
    parameters: int = Field(description="elements of all base tensors, tied ones once")
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    sandwich: bool = Field(False, description="norms after attention and after the MLP too (Gemma)")
    qk_norm: bool = Field(False, description="root-mean-square norm of each query and key head (Qwen3, Gemma 3)")
    biases: tuple[Target, ...] = Field((), description="linear layers that have a bias")
    activation: Literal["silu", "gelu_tanh", "relu"] = "silu"
    rope: Rope | None = Field(Rope(), description="null: learned positions, added to the embeddings (OPT)")
    window: int | None = Field(None, ge=1, description="tokens, its own included, that a sliding layer's token sees")
    sliding_layers: tuple[int, ...] = ()
    sliding_rope: Rope | None = Field(None, description="of sliding layers; null: as the others'")
    attention_scale: float = Field(description="of queries times keys")
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The norm vectors (hidden,) of one layer, in the order in which it takes them."""
        names = (
            ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm")
            if self.sandwich
            else ("input_norm", "post_norm")
        )
        return names if self.norm == "rms" else tuple(part for name in names for part in (name, f"{name}_bias"))

    @property
    def final_norms(self) -> tuple[str, ...]:
        """The vectors of the norm before lm_head."""
        return ("norm",) if self.norm == "rms" else ("norm", "norm_bias")

    @property
    def head_norms(self) -> tuple[str, ...]:
        """The norm vectors (head_dim,) of one layer."""
        return ("q_norm", "k_norm") if self.qk_norm else ()


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
    patterns = PINNED_PATTERNS if (directory / "tokenizer.json").is_file() else (*PINNED_PATTERNS, *VOCABULARY_FILES)
    pinned = tuple(sorted({file for pattern in patterns for file in directory.glob(pattern)}))
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
        return Path(snapshot_download(source, allow_patterns=[*PINNED_PATTERNS, *VOCABULARY_FILES]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnknownBase(f"{source} is no local directory or file and no model that can be downloaded") from error
