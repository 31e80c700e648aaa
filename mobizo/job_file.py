"""A job from a file and from what the command line says beside it. Knows no server."""

from __future__ import annotations

import json
from datetime import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.errors import BadRequest
from shared.job import JobRequest
from shared.rules import QuietHours


def read_request(file: Path, rules: dict[str, Any], changes: dict[str, Any]) -> JobRequest:
    """The job in `file`, with these rules and other fields in place of the file's own of the same names.

    Raises BadRequest, naming the field.
    """
    try:
        job = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{file} is not a JSON file: {error}") from error
    if isinstance(job, dict):
        if rules and isinstance(job.setdefault("rules", {}), dict):
            job["rules"] |= rules
        job |= changes
    try:
        return JobRequest.model_validate_json(json.dumps(job))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{file}: {where}: {first['msg']}" if where else f"{file}: {first['msg']}") from error


def parse_hours(text: str) -> dict[str, Any]:
    """The rule's form of a daily span such as 22:00-06:00. Raises BadRequest."""
    start, _, end = text.partition("-")
    try:
        span = QuietHours(start=time.fromisoformat(start.strip()), end=time.fromisoformat(end.strip()))
    except ValueError as error:
        raise BadRequest(f"{text!r} is no span of hours such as 22:00-06:00") from error
    return span.model_dump(mode="json")


def parse_start(text: str) -> dict[str, Any]:
    """The job's form of NAME or NAME@REVISION."""
    adapter, _, revision = text.partition("@")
    return {"adapter": adapter} | ({"revision": revision} if revision else {})
