"""Static files of the pages: their names contain a digest of their content, so browsers keep them for a year."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import Request, Response

from server.web.downloads import client_has
from server.web.routes import tag
from shared.canonical import sha256_hex
from shared.errors import NotFound

URL = "/ui/static/"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
DIGEST_DIGITS = 12
_IMMUTABLE = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    """A static file."""

    content: bytes
    media_type: str

    @cached_property
    def compressed(self) -> bytes:
        """The content as gzip."""
        return gzip.compress(self.content, 9, mtime=0)


def _named(name: str, content: bytes) -> str:
    path = PurePosixPath(name)
    return f"{path.stem}.{sha256_hex(content)[:DIGEST_DIGITS]}{path.suffix}"


@cache
def _assets() -> tuple[dict[str, Asset], dict[str, str]]:
    """Returns the assets by the name with the digest, and these names by the name of the file."""
    assets: dict[str, Asset] = {}
    names: dict[str, str] = {}
    for entry in files("server.dashboard").joinpath("static").iterdir():
        content = entry.read_bytes()
        name = _named(entry.name, content)
        kind = TYPES[PurePosixPath(entry.name).suffix]
        assets[name] = Asset(content, f"{kind}; charset=utf-8")
        names[entry.name] = name
    return assets, names


def asset_url(name: str) -> str:
    """Returns the address of a static file. Raises KeyError if there is none of that name."""
    return URL + _assets()[1][name]


def asset_response(request: Request, name: str) -> Response:
    """Returns a static file by its name with the digest, compressed if the browser accepts that. Raises NotFound."""
    asset = _assets()[0].get(name)
    if asset is None:
        raise NotFound("there is no such file; reload the page, which names the current ones")
    headers = {"Cache-Control": _IMMUTABLE, "ETag": tag(asset.content), "Vary": "Accept-Encoding"}
    if client_has(request.headers, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    content = asset.content
    if accepts_gzip(request):
        content, headers["Content-Encoding"] = asset.compressed, "gzip"
    return Response(content, headers=headers, media_type=asset.media_type)


def accepts_gzip(request: Request) -> bool:
    """Whether the client accepts gzip."""
    return "gzip" in request.headers.get("accept-encoding", "")
