"""A random Llama of 30 thousand weights and sentences it can read, so that a whole run takes half a second."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.programs import Compiled, compile_cold
from device_agent.journal import RunPlan
from server.compiler.base import locate_base
from shared.job import TrainingSettings
from shared.recipe import BaseRef, Recipe
from shared.tasks import named_task

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 48, 2, 4, 2, 8, 288
WORDS = ("warm", "funny", "dull", "tedious", "film", "plot", "cast", "joy", "bore", "bright", "flat", "weak")
SPLITS = {"train": 13, "validation": 9, "test": 7}
TASK = named_task("sst2")


def write_base(directory: Path) -> Path:
    """The model and its byte-level tokenizer, in the Hugging Face form."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    linear = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in linear.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": (rng.normal(0, 0.3, shape) if len(shape) == 2 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["It was terrible", "It was great"] * 50, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def compile_tiny(base: Path, directory: Path, **settings: object) -> Compiled:
    """A program of the model; by default with q = 2, E = 4, S = 40."""
    default = {"queries": 2, "sequence_length": 40, "answer_length": 6, "rank": 2, "alpha": 4, "choices": 2}
    reference = BaseRef(name="tiny", sha256=locate_base(str(base)).sha256)
    recipe = Recipe.model_validate({"base": reference, "effective_batch": 4} | default | settings)
    return compile_cold(recipe, directory, base)


def write_sentences(directory: Path) -> Path:
    """A data set of all three splits, with balanced labels."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    for split, count in SPLITS.items():
        lines = (
            {"text": " ".join(["the", *rng.sample(WORDS, 3)]), "label": ("negative", "positive")[index % 2]}
            for index in range(count)
        )
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def plan_of(program: Compiled, dataset: Path, training: TrainingSettings, job: str = "job-1") -> RunPlan:
    """What a run of the program on a data set is to train."""
    return RunPlan(
        job_id=job,
        task=TASK,
        training=training,
        manifest=program.manifest,
        dataset=dataset,
        program=program.file("program"),
        weights=program.file("weights"),
        tokenizer=program.file("tokenizer"),
    )
