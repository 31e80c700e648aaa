"""Classify sentences with and without adapters: stock transformers and peft, nothing of mobizo.

    python examples/classify.py MODEL.gguf --adapter DIRECTORY "A fine film." "A dull one."

Prints one JSON line per sentence: the sentence, and the answers of the base model and with each adapter, each with its
probability.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = (" terrible", " great")  # the answers of the paper's SST-2 template


def answer(model: Any, tokenizer: Any, sentence: str) -> tuple[str, float]:
    """Returns the more likely answer and its probability among the two."""
    ids = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in WORDS]
    with torch.no_grad():
        logits = model(**tokenizer(f"{sentence} It was", return_tensors="pt")).logits[0, -1]
    probabilities = torch.softmax(logits[ids], -1)
    best = int(probabilities.argmax())
    return WORDS[best].strip(), float(probabilities[best])


def main(gguf: Path, adapters: list[Path], sentences: list[str]) -> None:
    """Prints the answers."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    base = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    answers = [[answer(base, tokenizer, sentence) for sentence in sentences]]
    for adapter in adapters:
        tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
        answers.append([answer(tuned, tokenizer, sentence) for sentence in sentences])
        base = tuned.unload()
    for sentence, *found in zip(sentences, *answers, strict=True):
        sys.stdout.write(json.dumps({"sentence": sentence, "answers": found}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify sentences with and without adapters.")
    parser.add_argument("gguf", type=Path, help="the base model")
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="a PEFT directory; may be repeated")
    parser.add_argument("sentences", nargs="+")
    given = parser.parse_args()
    main(given.gguf, given.adapter, given.sentences)
