"""Checks data set directories without reading records."""

from __future__ import annotations

from pathlib import Path

from shared.errors import InvalidDataset


def check_directory(directory: Path) -> None:
    """Raises InvalidDataset unless `directory` can be a data set."""
    if not directory.is_dir():
        raise InvalidDataset(f"{directory} is no directory; a data set is a directory with a train.jsonl")
    if not (directory / "train.jsonl").is_file():
        raise InvalidDataset(f"{directory} has no train.jsonl, which every data set needs")
