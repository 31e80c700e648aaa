"""The client's downloads: a version in one of its formats, whole, and from whom it says it is. Knows no HTTP.

The server signs a version's facts (`mobizo.json`), among them the hashes of LoRA-B, of the frozen A and of the base.
LoRA-B is checked against the signed hash; files that the server makes of it, against the hash that it tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from mobizo.adapters import Adapters
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, MobizoError, Untrusted
from shared.protocol import AdapterVersion, ConversionState, MergedModel, PeftFile, PeftListing
from shared.registry import AdapterManifest, SignedAdapter
from shared.signing import verify_adapter

MANIFEST_NAME, GGUF_NAME, RAW_NAME = "mobizo.json", "adapter.gguf", "lora_B.safetensors"
LOOK_SECONDS = 1.0  # between looks at a merged model that is being made
Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all


class Format(StrEnum):
    """What a version may be had as."""

    PEFT = "peft"  # a directory that peft loads
    GGUF = "gguf"  # one file for llama.cpp
    RAW = "raw"  # LoRA-B as the device uploaded it
    MERGED = "merged"  # the base model with the adapter in it, as transformers loads it


class Pulling(Adapters):
    """Versions on this machine's disk."""

    def manifest(self, name: str, revision: str | int = "main") -> AdapterManifest:
        """A version's facts, once the server's signature over them holds. Raises Untrusted."""
        return self._facts(self.version(name, revision))[0]

    def card(self, name: str, revision: str | int = "main") -> str:
        """A version's model card, Markdown."""
        return self._transport.request("GET", f"{version_address(self.version(name, revision))}/peft/README.md").text

    def pull(
        self,
        name: str,
        directory: Path,
        revision: str | int = "main",
        format: Format | str = Format.PEFT,
        *,
        base_sha256: str | None = None,
        progress: Progress | None = None,
    ) -> AdapterVersion:
        """Writes a version to a directory. Files that are there already are not fetched again; broken ones go on.

        `mobizo.json` is written last: where it lies, the rest is whole. base_sha256: of the base model that it is for.
        Raises BaseMismatch if it is for another, Untrusted for a file or signature that does not match.
        """
        found = self.version(name, revision)
        manifest, signed = self._facts(found)
        if base_sha256 is not None and manifest.base.sha256 != base_sha256:
            raise BaseMismatch(f"{name} v{found.version} is for base {manifest.base.name} {manifest.base.sha256}")
        root, files = self._files(found, manifest, Format(format))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        for file in files:
            self._fetch(f"{root}/{file.path}", file, directory / file.path, progress)
        (directory / MANIFEST_NAME).write_bytes(signed)
        return found

    def merge(self, name: str, revision: str | int = "main") -> MergedModel:
        """Asks for a version merged into its base model; a worker of the server makes it."""
        return MergedModel.model_validate(self._make(f"{version_address(self.version(name, revision))}/merged"))

    def merged(self, name: str, revision: str | int = "main") -> MergedModel:
        """Where a merged model stands. Raises NotFound for one that nobody asked for."""
        return MergedModel.model_validate(self._get(f"{version_address(self.version(name, revision))}/merged"))

    def _facts(self, version: AdapterVersion) -> tuple[AdapterManifest, bytes]:
        """The manifest, and the signed file that it came in. Raises Untrusted if it is not that version's."""
        content = self._transport.request("GET", f"{version_address(version)}/peft/{MANIFEST_NAME}").content
        try:
            signed = SignedAdapter.model_validate_json(content)
        except ValidationError as error:
            raise Untrusted(f"what the server calls {MANIFEST_NAME} is no signed manifest") from error
        manifest = verify_adapter(signed, self._pins.key(self.address, signed.key_id, self.keys))
        told = (version.adapter, version.version, version.revision, version.sha256)
        if (manifest.adapter, manifest.version, manifest.revision, manifest.sha256) != told:
            raise Untrusted(f"the signed facts are not those of {version.adapter} v{version.version}")
        return manifest, content

    def _files(self, version: AdapterVersion, manifest: AdapterManifest, format: Format) -> tuple[str, list[PeftFile]]:
        """Where a format's files are asked for, and which they are, `mobizo.json` left out."""
        root = f"{version_address(version)}/peft"
        match format:
            case Format.RAW:
                return root, [PeftFile(path=RAW_NAME, size=manifest.size, sha256=manifest.sha256)]
            case Format.GGUF:
                return root, [self._told(f"{root}/{GGUF_NAME}", GGUF_NAME)]
            case Format.MERGED:
                return f"{version_address(version)}/merged", _plain(self._ready(version).files)
            case Format.PEFT:
                return root, _plain(PeftListing.model_validate(self._get(root)).files)

    def _told(self, address: str, name: str) -> PeftFile:
        """A file that is in no listing, as the server tells it. Raises Untrusted if it does not."""
        headers = self._transport.request("HEAD", address).headers
        size, tag = headers.get("Content-Length", ""), headers.get("ETag", "").strip('"')
        try:
            return PeftFile(path=name, size=int(size), sha256=tag)
        except ValueError as error:
            raise Untrusted(f"the server does not say which file {name} is") from error

    def _ready(self, version: AdapterVersion) -> MergedModel:
        """A merged model, once a worker has made it. Raises MobizoError if it cannot."""
        made = self.merge(version.adapter, version.version)
        while made.state is not ConversionState.READY:
            if made.error is not None:
                raise MobizoError(f"it cannot be merged: {made.error.detail}")
            time.sleep(LOOK_SECONDS)
            made = self.merged(version.adapter, version.version)
        return made

    def _fetch(self, path: str, file: PeftFile, target: Path, progress: Progress | None) -> None:
        if target.is_file() and target.stat().st_size == file.size and file_sha256(target) == file.sha256:
            return

        def tell(have: int, size: int) -> None:
            if progress is not None:
                progress(file.path, have, size)

        self._transport.download(path, target, size=file.size, sha256=file.sha256, progress=tell)


def _plain(files: Iterable[PeftFile]) -> list[PeftFile]:
    """All but the signed facts. Raises Untrusted for a name that leaves the directory."""
    found = [file for file in files if file.path != MANIFEST_NAME]
    for file in found:
        if Path(file.path).name != file.path or file.path in ("", ".", ".."):
            raise Untrusted(f"the server names a file {file.path!r}, which is no plain file name")
    return found


def version_address(version: AdapterVersion) -> str:
    """Where a version's routes begin."""
    return f"/v1/adapters/{version.adapter}/versions/{version.version}"
