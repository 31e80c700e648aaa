"""Writes Ollama's `Modelfile` of an adapter: the base, the GGUF adapter beside it, the chat template and stop texts.

Source: Ollama's `docs/modelfile.mdx` and `parser/parser.go`.
"""

from __future__ import annotations

from server.registry.exports.go_template import NotExpressible, Turns, turns_of
from shared.chat_template import ChatTemplate
from shared.recipe import BaseRef

MODELFILE_NAME = "Modelfile"
BASE_FILE = "./base.gguf"  # what FROM names; `mobizo adapter pull --format ollama --base` writes another
ADAPTER_FILE = "./adapter.gguf"


def modelfile(title: str, base: BaseRef, hub_id: str | None, template: ChatTemplate | None) -> bytes:
    """Returns the file's content; the same arguments give the same bytes.

    title: what the adapter is called in the first line. hub_id: the base's id on the Hugging Face Hub, if it has one.
    template: the base's chat template; where Go's templates cannot express it, a comment says so, and Ollama takes
    the template in the metadata of the base's GGUF file.
    """
    base_title = base.name if hub_id is None else f"{hub_id} on the Hugging Face Hub"
    lines = [
        f"# {_one_line(title)}. Use it by: ollama create NAME -f {MODELFILE_NAME}",
        f"# The base is {_one_line(base_title)}, sha256 {base.sha256}.",
        "# FROM: a GGUF file of that base, or its name at Ollama, such as hf.co/OWNER/NAME-GGUF.",
        f"FROM {BASE_FILE}",
        f"ADAPTER {ADAPTER_FILE}",
    ]
    turns: Turns | None = None
    if template is None:
        lines.append("# The base has no chat template: use /api/generate with raw, or add a TEMPLATE.")
    else:
        try:
            turns = turns_of(template)
            lines.append(f'TEMPLATE """{turns.go_template()}"""')
        except NotExpressible as reason:
            lines.append(f"# No TEMPLATE, because {_one_line(str(reason))}.")
            lines.append("# Ollama takes the template in the metadata of the base's GGUF file.")
        lines += [f'PARAMETER stop "{text}"' for text in _stops(template, turns)]
    return ("\n".join(lines) + "\n").encode()


def _stops(template: ChatTemplate, turns: Turns | None) -> list[str]:
    """Returns the texts that end an answer: what the template writes after one, and the end-of-text token."""
    after = "" if turns is None else turns.around["assistant"][1].strip()
    stops = dict.fromkeys([after, template.tokens.get("eos_token", "")])
    return [text for text in stops if text and '"' not in text and "\n" not in text]


def _one_line(text: str) -> str:
    return " ".join(text.split())
