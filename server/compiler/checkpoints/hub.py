"""Downloads a base model from the Hugging Face Hub into its client's cache, or from the mirror in HF_ENDPOINT.

A client of this project's registry sets HF_ENDPOINT to the registry, which has adapters only. Bases then come from the
Hub itself, without the registry's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.errors import MobizoError, UnknownBase

HUB = "https://huggingface.co"
PROBE_SECONDS = 5.0  # for the endpoint to say what it is


def download(source: str, patterns: Sequence[str]) -> Path:
    """Returns the directory with the files of the model `source` whose names match; those in the cache stay.

    Raises UnknownBase, which says whether there is no such model or the Hub requires a token for it.
    """
    from huggingface_hub import constants, get_token, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    options: dict[str, Any] = {}
    redirected = is_registry(constants.ENDPOINT)
    if redirected:
        options = {"endpoint": HUB, "token": False}  # the token is the registry's
    endpoint = HUB if redirected else constants.ENDPOINT
    remedy = "set HF_TOKEN to a token of your account there"
    if redirected:
        remedy = f"unset HF_ENDPOINT, which names a registry of adapters, and {remedy}"
    elif get_token() is not None:
        remedy = "give the account of your token access to it"
    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns), **options))
    except GatedRepoError as error:
        raise UnknownBase(
            f"{source} is gated: accept its conditions at {endpoint}/{source}, {remedy}, and try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownBase(
            f"{endpoint} has no model {source}, or it is private; check the id, or {remedy}; a local base is a "
            "directory or a .gguf file"
        ) from error
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UnknownBase(
            f"{source} is neither a local directory or file nor a model that can be downloaded from {endpoint}"
        ) from error
    except HfHubHTTPError.__bases__ as error:  # the HTTP library's error, whichever it is, and a full disk's OSError
        raise UnknownBase(
            f"the download of {source} from {endpoint} broke off ({error or type(error).__name__}); repeat the "
            "command, which keeps the files that are complete"
        ) from error


def is_registry(endpoint: str) -> bool:
    """Whether an endpoint of the Hub's API is a server of this project."""
    from shared.transport import Transport

    if endpoint.rstrip("/") == HUB:
        return False
    try:
        with Transport(endpoint, None, timeout=PROBE_SECONDS, attempts=1) as transport:
            info = transport.request("GET", "/v1/server").json()
    except (MobizoError, ValueError):
        return False
    return isinstance(info, dict) and info.get("name") == "mobizo" and "public_key" in info
