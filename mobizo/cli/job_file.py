"""Reads a job from a JSON file and merges it with the options of `mobizo job submit`."""

from __future__ import annotations

import json
from datetime import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mobizo.adapter_paths import split_reference
from shared.errors import BadRequest
from shared.invalid_fields import first_invalid
from shared.job import JobRequest
from shared.rules import QuietHours


def read_request(
    file: Path, rules: dict[str, Any], changes: dict[str, Any], recipe: dict[str, Any] | None = None
) -> JobRequest:
    """Returns the job in `file`, in which `rules`, `changes` and `recipe` replace the fields of the same names.

    rules, recipe: fields of the job's `rules` and `recipe`. changes: other fields of the job. Raises BadRequest, which
    names the field.
    """
    try:
        job = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file} is not a JSON file: {error}") from error
    if isinstance(job, dict):
        for section, fields in (("rules", rules), ("recipe", recipe or {})):
            if fields and isinstance(job.setdefault(section, {}), dict):
                job[section] |= fields
        job |= changes
    try:
        return JobRequest.model_validate_json(json.dumps(job))
    except ValidationError as error:
        raise BadRequest(f"{file}: {first_invalid(error)}") from error


def parse_hours(text: str) -> dict[str, Any]:
    """Returns a daily time span such as 22:00-06:00 as the job's rules hold it. Raises BadRequest."""
    start, _, end = text.partition("-")
    try:
        span = QuietHours(start=time.fromisoformat(start.strip()), end=time.fromisoformat(end.strip()))
    except ValueError as error:
        raise BadRequest(f"{text!r} is not a time span such as 22:00-06:00") from error
    return span.model_dump(mode="json")


def parse_start(text: str) -> dict[str, Any]:
    """Returns NAME or NAME@REVISION as the job's `start` holds it."""
    adapter, revision = split_reference(text)
    return {"adapter": adapter} | ({"revision": revision} if revision else {})
