"""Classify sentences with and without an adapter: stock transformers and peft, nothing of mobizo.

    python examples/classify.py MODEL.gguf ADAPTER_DIRECTORY "A fine film." "A dull one."

Prints one JSON line per sentence: sentence, and for each of `without` and `with` the answer and its probability.
"""

from __future__ import annotations

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


def main(gguf: Path, adapter: Path, sentences: list[str]) -> None:
    """Prints the answers."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    base = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    without = [answer(base, tokenizer, sentence) for sentence in sentences]
    tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
    for sentence, before in zip(sentences, without, strict=True):
        line = {"sentence": sentence, "without": before, "with": answer(tuned, tokenizer, sentence)}
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
