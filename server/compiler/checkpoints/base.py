"""A base model's architecture facts and its files: directories, Hugging Face ids and GGUF files.

No weight is read here, and torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from server.compiler.checkpoints.hub import download
from shared.canonical import canonical_json, file_sha256, sha256_hex
from shared.errors import UnreadableCheckpoint
from shared.recipe import Target
from shared.strict_model import StrictModel
from shared.zo.lora import BaseShape

# The files that determine the computation and the tokenization of a Hugging Face model.
PINNED_PATTERNS = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
NormPlace = Literal["input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"]
UNHASHED = "0" * 64  # of facts while the files are not hashed yet
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PARTS = (".safetensors", ".bin", ".pt", ".pth", ".json")  # endings of files that are only a part of a model
VOCABULARY_FILES = ("vocab.json", "merges.txt")  # used only without tokenizer.json
TEXT_FILES = ("chat_template.jinja", "generation_config.json")  # read, but not pinned: they change no tensor


class Rope(StrictModel):
    """Rotary position embedding: base frequency, and its scaling for long contexts."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "factors", "yarn"] = "default"
    factor: float = 1.0
    factors: tuple[float, ...] = Field((), description="for kind factors: divisor of each pair's frequency")
    long_factors: tuple[float, ...] = Field(
        (), description="for kind factors: the divisors of texts longer than original_context; empty: the same"
    )
    ramp: tuple[float, float] = Field((0.0, 1.0), description="for kind yarn: first and last pair that is blended")
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    attention_factor: float = Field(1.0, description="factor of rotated queries and of rotated keys")


class AttentionKind(StrictModel):
    """What layers of one kind of attention have in common."""

    rope: Rope | None = Field(Rope(), description="null: queries and keys are not rotated")
    window: int | None = Field(None, ge=1, description="attention window in tokens, including the token itself")


class BaseFacts(BaseShape):
    """The architecture facts of a base model, known without reading its weights. They configure the decoder."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="pins the files: canonical JSON of [name, sha256] pairs")
    form: Literal["huggingface", "gguf"]
    tied: bool = Field(description="lm_head is the embedding table")
    parameters: int = Field(description="number of elements of all base tensors; tied tensors count once")
    conv_taps: int = Field(1, ge=1, le=64, description="tokens that a convolution reads, the newest one included")
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norms: tuple[NormPlace, ...] = Field(
        ("input_norm", "post_norm"),
        description="norms of a layer: before attention, after it, before the MLP, after it",
    )
    parallel: bool = Field(
        False, description="the MLP reads the layer's input, as attention does, by post_norm or else by input_norm"
    )
    qk_norm: Literal["head", "width"] | None = Field(
        None, description="root-mean-square norm of queries and keys: of each head, or of all heads together"
    )
    qk_norm_after_rope: bool = False
    biases: tuple[Target, ...] = Field((), description="linear layers that have a bias")
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    learned_positions: bool = Field(False, description="learned positions, added to the embeddings; no rotation")
    attention: tuple[AttentionKind, ...] = Field((AttentionKind(),), min_length=1, max_length=2)
    layer_kinds: tuple[int, ...] = Field((), description="kind of attention of each layer; empty: all have the first")
    attention_scale: float = Field(description="factor of the attention scores")
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = Field(1.0, description="factor of what attention and the MLP add to the hidden states")
    logits_scale: float = Field(1.0, description="factor of the logits; readers fold it into the final norm")

    def kind(self, layer: int) -> int:
        """Index of a layer's kind of attention; convolutions are the kind after the last one."""
        if layer in self.conv_layers:
            return len(self.attention)
        return self.layer_kinds[layer] if self.layer_kinds else 0

    def of_layer(self, layer: int) -> Self:
        """Returns the facts of a base with this layer alone."""
        facts = super().of_layer(layer)
        return facts.model_copy(update={"qk_norm": None}) if self.conv_layers and facts.convolves else facts

    @property
    def windowed(self) -> bool:
        """Whether some layers attend within a window."""
        return any(kind.window is not None for kind in self.attention)

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of the norm vectors (hidden,) of one layer, in input order."""
        return self.vectors_of(self.norms)

    def vectors_of(self, norms: Sequence[NormPlace]) -> tuple[str, ...]:
        """Names of the vectors of some norms over hidden states, in input order."""
        return tuple(norms) if self.norm == "rms" else tuple(part for name in norms for part in (name, f"{name}_bias"))

    @property
    def attention_norms(self) -> tuple[NormPlace, ...]:
        """Norms that a layer reads before its attention."""
        return tuple(name for name in self.norms if name == "input_norm")

    @property
    def finishing_norms(self) -> tuple[NormPlace, ...]:
        """Norms that a layer reads after its attention."""
        shared = self.parallel and "post_norm" not in self.norms
        return tuple(name for name in self.norms if name != "input_norm" or shared)

    @property
    def final_norms(self) -> tuple[str, ...]:
        """Names of the vectors of the norm before lm_head."""
        return ("norm",) if self.norm == "rms" else ("norm", "norm_bias")

    @property
    def head_norms(self) -> tuple[str, ...]:
        """Names of the norm vectors of one layer's queries and keys."""
        return ("q_norm", "k_norm") if self.qk_norm else ()

    @property
    def mixer_vectors(self) -> dict[str, int]:
        """Names and sizes of the vectors of one layer's mixer: norms of queries and keys, or a convolution's taps.

        The last tap is the newest token's.
        """
        if self.convolves:
            return {f"tap_{tap}": self.hidden for tap in range(self.conv_taps)}
        return {name: self.head_norm_size(name) for name in self.head_norms}

    @property
    def mixer_rows(self) -> int:
        """The most vectors that a layer's mixer has."""
        return max(len(kind.mixer_vectors) for kind in self.of_layers())

    def head_norm_size(self, name: str) -> int:
        """Elements of one of `head_norms`."""
        heads = self.heads if name == "q_norm" else self.kv_heads
        return self.head_dim if self.qk_norm == "head" else heads * self.head_dim


@dataclass(frozen=True)
class BaseFiles:
    """A base model's files on this machine."""

    form: Literal["huggingface", "gguf"]
    root: Path  # the directory, or the GGUF file itself
    pinned: tuple[Path, ...]

    @property
    def sha256(self) -> str:
        """The digest that identifies this base. It covers the names and bytes of all pinned files."""
        pairs = sorted([path.name, file_sha256(path)] for path in self.pinned)
        return sha256_hex(canonical_json(pairs))


def locate_base(source: str) -> BaseFiles:
    """Returns the files of `source`: a directory, a .gguf file, or a Hugging Face id (downloaded into its cache).

    Raises UnknownBase if `source` does not exist, UnreadableCheckpoint if files are missing.
    """
    path = Path(source)
    if path.is_file() and path.suffix in PARTS:
        raise UnreadableCheckpoint(f"{path.name} is one file of a model; give its directory, or a .gguf file")
    if path.is_file():
        return BaseFiles("gguf", path, (path,))
    all_patterns = (*PINNED_PATTERNS, "*.safetensors", INDEX, *VOCABULARY_FILES, *TEXT_FILES)
    if not path.is_dir():
        check_config(source, download(source, ("config.json",)))  # before the weights, which take minutes
    directory = path if path.is_dir() else download(source, all_patterns)
    patterns = PINNED_PATTERNS if (directory / "tokenizer.json").is_file() else (*PINNED_PATTERNS, *VOCABULARY_FILES)
    check_config(source, directory)
    if (directory / "adapter_config.json").is_file():
        raise UnreadableCheckpoint(f"{source} has an adapter beside the model; merge it, or remove adapter_config.json")
    configured = {file for pattern in patterns for file in directory.glob(pattern)}
    return BaseFiles("huggingface", directory, tuple(sorted(configured | set(weight_files(directory)))))


def require_config(source: str, directory: Path) -> None:
    """Raises UnreadableCheckpoint if the files of `source` in `directory` have no config.json."""
    if not (directory / "config.json").is_file():
        adapter = (directory / "adapter_config.json").is_file()
        what = "is an adapter without its base model" if adapter else "has no config.json"
        raise UnreadableCheckpoint(f"{source} {what}; give a Hugging Face model directory or a .gguf file")


def check_config(source: str, directory: Path) -> None:
    """Raises UnsupportedModel for a config.json of another architecture or with unsupported options.

    Raises UnreadableCheckpoint without a config.json.
    """
    require_config(source, directory)
    from server.compiler.checkpoints.hf_config import config_facts  # which imports this module

    # Reported with the other files.
    with suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError):
        config_facts(json.loads((directory / "config.json").read_text(encoding="utf-8-sig")))


def weight_map(directory: Path) -> dict[str, str] | None:
    """Returns the name of the file that holds each tensor, as the index says; None without an index.

    Raises UnreadableCheckpoint for an index that is damaged.
    """
    if not (directory / INDEX).is_file():
        return None
    try:
        files = json.loads((directory / INDEX).read_text(encoding="utf-8-sig"))["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpoint(f"{INDEX} has no weight_map; copy or download that file again") from error


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that hold a Hugging Face model's weights, with their index if there is one.

    As in transformers, the index decides, and without an index it is `model.safetensors`; other files are not read.
    Raises UnreadableCheckpoint if a file is missing, or if it is not clear which files are the model's.
    """
    present = sorted(file.name for file in directory.glob("*.safetensors"))
    files = weight_map(directory)
    if files is not None:
        named = sorted(set(files.values()))
        if missing := [name for name in named if name not in present]:
            raise UnreadableCheckpoint(
                f"{missing[0]}, which {INDEX} names, is missing ({len(missing)} of {len(named)} files); copy or "
                "download all weight files"
            )
        if WEIGHTS in present and WEIGHTS not in named:
            raise UnreadableCheckpoint(f"{INDEX} does not name {WEIGHTS}; remove the one that is not this model's")
        return [directory / name for name in (INDEX, *named)]
    if not present:
        raise UnreadableCheckpoint(f"{directory.name} has no .safetensors file; download it, or convert other weights")
    if WEIGHTS not in present and len(present) > 1:
        raise UnreadableCheckpoint(
            f"{directory.name} has {len(present)} .safetensors files but no {INDEX}; copy or download that file too"
        )
    return [directory / (WEIGHTS if WEIGHTS in present else present[0])]


def base_name(source: str, files: BaseFiles) -> str:
    """Returns a short name of the base: its file or directory name, or the last part of its id."""
    path = Path(source)
    if files.form == "gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else path.name
