"""Classify sentences with and without adapters: stock transformers and peft, nothing of mobizo.

    python examples/classify.py MODEL.gguf --adapter DIRECTORY "A fine film." "A dull one."

Prints one JSON line per sentence: the sentence, and the answers of the base model and with each adapter, each with its
probability. With `--adapter -` the directories are read from standard input, one a line, and each is used at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SENTENCES = (
    "A warm, funny, beautifully acted film that stays with you.",
    "Two hours of my life that I will never get back.",
    "The plot makes no sense and nobody on screen seems to care.",
    "Sharp writing and a terrific cast make this an unexpected delight.",
    "Not nearly as clever as it thinks it is.",
    "It left me grinning all the way home.",
    "The jokes are stale, and the ending insults its audience.",
    "A quiet little gem.",
    "I have seen better acting in commercials.",
    "Every frame is a joy to look at.",
)
WORDS = (" terrible", " great")  # the answers of the paper's SST-2 template


def answer(model: Any, tokenizer: Any, sentence: str) -> tuple[str, float]:
    """Returns the more likely answer and its probability among the two."""
    ids = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in WORDS]
    with torch.no_grad():
        logits = model(**tokenizer(f"{sentence} It was", return_tensors="pt")).logits[0, -1]
    probabilities = torch.softmax(logits[ids], -1)
    best = int(probabilities.argmax())
    return WORDS[best].strip(), float(probabilities[best])


def main(gguf: Path, adapters: Iterable[Path], sentences: Sequence[str]) -> None:
    """Prints the answers."""
    # The class that AutoTokenizer chooses, after it has read the model's configuration for seconds.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    base = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    answers = [[answer(base, tokenizer, sentence) for sentence in sentences]]
    for adapter in adapters:
        tuned = PeftModel.from_pretrained(base, str(adapter)).eval()
        answers.append([answer(tuned, tokenizer, sentence) for sentence in sentences])
        base = tuned.unload()
    for sentence, *labels in zip(sentences, *answers, strict=True):
        sys.stdout.write(json.dumps({"sentence": sentence, "answers": labels}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify sentences with and without adapters.")
    parser.add_argument("gguf", type=Path, help="the base model")
    parser.add_argument(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        help="a PEFT directory; may be repeated; - reads them from standard input",
    )
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="default: ten sentences about films")
    arguments = parser.parse_args()
    from_input = arguments.adapter == [Path("-")]
    main(
        arguments.gguf,
        (Path(line.rstrip("\n")) for line in sys.stdin) if from_input else arguments.adapter,
        arguments.sentences,
    )
