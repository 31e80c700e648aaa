"""The client's downloads: a version in one of its formats, whole, and from whom it says it is. Knows no HTTP.

The server signs a version's facts (`mobizo.json`), among them the hashes of LoRA-B, of the frozen A and of the base.
LoRA-B is checked against the signed hash; files that the server makes of it, against the hash that it tells.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from mobizo.adapters import Adapters
from shared.canonical import file_sha256
from shared.errors import BaseMismatch, Untrusted
from shared.protocol import AdapterVersion, PeftFile, PeftListing
from shared.registry import AdapterManifest, SignedAdapter
from shared.signing import verify_adapter

MANIFEST_NAME = "mobizo.json"
Progress = Callable[[str, int, int], None]  # file, bytes so far, bytes in all


class Format(StrEnum):
    """What a version may be had as."""

    PEFT = "peft"  # a directory that peft loads
    GGUF = "gguf"  # one file for llama.cpp
    RAW = "raw"  # LoRA-B as the device uploaded it, for mobizo-agent


ONE_FILE = {Format.GGUF: "adapter.gguf", Format.RAW: "lora_B.safetensors"}


class Pulling(Adapters):
    """Versions on this machine's disk."""

    def manifest(self, name: str, revision: str | int = "main") -> AdapterManifest:
        """A version's facts, once the server's signature over them holds. Raises Untrusted."""
        return self._facts(self.version(name, revision))[0]

    def card(self, name: str, revision: str | int = "main") -> str:
        """A version's model card, Markdown."""
        found = self.version(name, revision)
        path = f"/v1/adapters/{found.adapter}/versions/{found.version}/peft/README.md"
        return self._transport.request("GET", path).text

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
        files = self._files(manifest, Format(format))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST_NAME).unlink(missing_ok=True)
        for file in files:
            self._fetch(_address(manifest, file.path), file, directory / file.path, progress)
        (directory / MANIFEST_NAME).write_bytes(signed)
        return found

    def _facts(self, version: AdapterVersion) -> tuple[AdapterManifest, bytes]:
        """The manifest, and the signed file that it came in. Raises Untrusted if it is not that version's."""
        path = f"/v1/adapters/{version.adapter}/versions/{version.version}/peft/{MANIFEST_NAME}"
        content = self._transport.request("GET", path).content
        try:
            signed = SignedAdapter.model_validate_json(content)
        except ValidationError as error:
            raise Untrusted(f"what the server calls {MANIFEST_NAME} is no signed manifest") from error
        key = self._pins.key(self.address, signed.key_id, self.keys)
        manifest = verify_adapter(signed, key)
        told = (version.adapter, version.version, version.revision, version.sha256)
        if (manifest.adapter, manifest.version, manifest.revision, manifest.sha256) != told:
            raise Untrusted(f"the signed facts are not those of {version.adapter} v{version.version}")
        return manifest, content

    def _files(self, manifest: AdapterManifest, format: Format) -> list[PeftFile]:
        if format is Format.RAW:
            return [PeftFile(path=ONE_FILE[format], size=manifest.size, sha256=manifest.sha256)]
        if format in ONE_FILE:
            return [self._told(manifest, ONE_FILE[format])]
        listing = PeftListing.model_validate(self._get(_address(manifest)))
        for file in listing.files:
            if Path(file.path).name != file.path or file.path in ("", ".", ".."):
                raise Untrusted(f"the server names a file {file.path!r}, which is no plain file name")
        return [file for file in listing.files if file.path != MANIFEST_NAME]

    def _told(self, manifest: AdapterManifest, name: str) -> PeftFile:
        """A file that is in no listing, as the server tells it."""
        headers = self._transport.request("HEAD", _address(manifest, name)).headers
        size, tag = headers.get("Content-Length", ""), headers.get("ETag", "").strip('"')
        try:
            return PeftFile(path=name, size=int(size), sha256=tag)
        except ValueError as error:
            raise Untrusted(f"the server does not say which file {name} is") from error

    def _fetch(self, path: str, file: PeftFile, target: Path, progress: Progress | None) -> None:
        if target.is_file() and target.stat().st_size == file.size and file_sha256(target) == file.sha256:
            return

        def tell(have: int, size: int) -> None:
            if progress is not None:
                progress(file.path, have, size)

        self._transport.download(path, target, size=file.size, sha256=file.sha256, progress=tell)


def _address(manifest: AdapterManifest, file: str | None = None) -> str:
    root = f"/v1/adapters/{manifest.adapter}/versions/{manifest.version}/peft"
    return root if file is None else f"{root}/{file}"
