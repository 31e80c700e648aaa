"""Downloads of adapter versions in one of several formats, resumable and verified by signature and sha256.

The server signs a version's manifest (`mobizo.json`), which holds the hashes of LoRA-B, of the frozen A and of the base
model. LoRA-B is checked against the signed hash. Files that the server derives from LoRA-B are not covered by the
signature; they are checked against the hash that the server states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from mobizo.adapter_paths import version_path
from mobizo.connection import Connection
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, MobizoError, Unavailable, Untrusted
from shared.protocol import AdapterVersion, PeftFile, PeftListing
from shared.registry import AdapterManifest, SignedAdapter
from shared.signing import verify_adapter

MANIFEST_NAME, GGUF_NAME, RAW_NAME = "mobizo.json", "adapter.gguf", "lora_B.safetensors"
MODELFILE_NAME = "Modelfile"
DownloadProgress = Callable[[str, int, int], None]  # file name, bytes so far, bytes in total


class Format(StrEnum):
    """File formats of a version."""

    PEFT = "peft"  # a directory that peft loads
    GGUF = "gguf"  # one file for llama.cpp
    OLLAMA = "ollama"  # the GGUF file and a Modelfile
    RAW = "raw"  # LoRA-B as the device uploaded it


def fetch_manifest(connection: Connection, version: AdapterVersion) -> tuple[AdapterManifest, bytes]:
    """Returns a version's verified manifest and the content of its signed file.

    Raises Untrusted if the signature is not by a trusted key, or if the manifest is that of another version.
    """
    content = connection.transport.request("GET", f"{version_path(version)}/peft/{MANIFEST_NAME}").content
    try:
        signed = SignedAdapter.model_validate_json(content)
    except ValidationError as error:
        raise Untrusted(f"{MANIFEST_NAME} from the server is not a signed manifest") from error
    manifest = verify_adapter(signed, connection.trusted_key(signed.key_id))
    expected = (version.adapter, version.version, version.revision, version.sha256)
    if (manifest.adapter, manifest.version, manifest.revision, manifest.sha256) != expected:
        raise Untrusted(f"the signed manifest is not that of {version.adapter} v{version.version}")
    return manifest, content


def download_version(
    connection: Connection,
    version: AdapterVersion,
    directory: Path,
    format: Format,
    base_sha256: str | None,
    progress: DownloadProgress | None,
) -> None:
    """Writes a version's files to a directory; `mobizo.client.Client.adapters.download` describes the parameters."""
    manifest, signed = fetch_manifest(connection, version)
    if base_sha256 is not None and manifest.base.sha256 != base_sha256:
        raise BaseMismatch(
            f"{version.adapter} v{version.version} is for base model {manifest.base.name} with sha256 "
            f"{manifest.base.sha256}"
        )
    root = f"{version_path(version)}/peft"
    files = _files(connection, root, manifest, format)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    for file in files:
        download_file(connection, f"{root}/{file.path}", file, directory / file.path, progress)
    (directory / MANIFEST_NAME).write_bytes(signed)


def download_file(
    connection: Connection, path: str, file: PeftFile, target: Path, progress: DownloadProgress | None
) -> None:
    """Downloads one file to `target` unless `target` already has its sha256. Resumes an interrupted download.

    Raises Untrusted if the received bytes do not have the size and sha256 of `file`.
    """
    if target.is_file() and target.stat().st_size == file.size and file_sha256(target) == file.sha256:
        return

    def report(received: int, size: int) -> None:
        if progress is not None:
            progress(file.path, received, size)

    connection.transport.download(path, target, size=file.size, sha256=file.sha256, progress=report)


def describe_file(connection: Connection, path: str, name: str) -> PeftFile:
    """Returns size and sha256 of a file from its response headers.

    Raises Untrusted if the headers lack them, or the server's error, such as NotFound.
    """
    try:
        headers = connection.transport.request("HEAD", path).headers
    except Unavailable:
        raise
    except MobizoError:
        connection.transport.request("GET", path)  # raises the full error: a response to HEAD has no problem document
        raise
    size, etag = headers.get("Content-Length", ""), headers.get("ETag", "").strip('"')
    try:
        return PeftFile(path=name, size=int(size), sha256=etag)
    except ValueError as error:
        raise Untrusted(f"the server does not state the size and sha256 of {name}") from error


def _files(connection: Connection, root: str, manifest: AdapterManifest, format: Format) -> list[PeftFile]:
    """Returns the files of a format except `mobizo.json`. root: path of the version's files."""
    if format is Format.RAW:
        return [PeftFile(path=RAW_NAME, size=manifest.size, sha256=manifest.sha256)]
    if format is Format.PEFT:
        return _checked_names(connection.get(PeftListing, root).files)
    names = [GGUF_NAME] if format is Format.GGUF else [GGUF_NAME, MODELFILE_NAME]
    return [describe_file(connection, f"{root}/{name}", name) for name in names]


def _checked_names(files: Iterable[PeftFile]) -> list[PeftFile]:
    """Returns all files except the manifest. Raises Untrusted for a path that could leave the target directory."""
    content_files = [file for file in files if file.path != MANIFEST_NAME]
    for file in content_files:
        if Path(file.path).name != file.path or file.path in ("", ".", ".."):
            raise Untrusted(f"the server lists {file.path!r}, which is not a plain file name")
    return content_files
