"""Common options of the commands, and output as text or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from shared.invalid_fields import first_invalid
from shared.result import Result

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = TypeVar("Model", bound=BaseModel)
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def stop(message: str, status: int) -> typer.Exit:
    """Prints a message in red on standard error, and returns the exception that ends the command with this status."""
    err.print(message, style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


def read_file(file: Path, kind: type[Model]) -> Model:
    """Returns the object in a JSON file. Ends the command with status 2, and names the field, if it is not valid."""
    try:
        return kind.model_validate_json(json.dumps(json.loads(file.read_bytes())))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise stop(f"{file} is not a JSON file: {error}", 2) from error
    except ValidationError as error:
        raise stop(f"{file}: {first_invalid(error)}", 2) from error


def percent(value: float | None) -> str:
    """Returns a fraction as percent with one decimal, or an empty text for None."""
    return "" if value is None else f"{value:.1%}"


def score_text(result: Result) -> str:
    """Returns the accuracy or perplexity of an adapter as text, marked if it is from the validation split or from few
    examples.
    """
    text = percent(result.tuned_accuracy)
    if result.perplexities is not None:
        text = f"perplexity {result.perplexities[1]:.2f}"
    notes = ["validation"] if text and result.accuracy_split == "validation" else []
    notes += [result.small_split_note] if result.small_split_note else []
    return f"{text} ({', '.join(notes)})" if notes else text


def print_json(value: BaseModel | list[BaseModel] | dict[str, Any]) -> None:
    """Prints a value as JSON on standard output."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, list):
        plain = [item.model_dump(mode="json") for item in value]
    else:
        plain = value
    out.print_json(json.dumps(plain))


def show(as_json: bool, value: BaseModel | list[BaseModel] | dict[str, Any], text: str) -> None:
    """Prints `value` as JSON, or `text`."""
    print_json(value) if as_json else out.print(text, markup=False, soft_wrap=True)
