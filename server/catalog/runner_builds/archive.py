"""Whether an archive may be offered as a runner: a .tar.gz that every device can unpack without fear.

Reads it; writes nothing.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

from shared.canonical import CHUNK_BYTES
from shared.elf import HEADER_BYTES, wrong_machine
from shared.errors import BadRequest

PROGRAM = "mobizo-runner"
MEMBER = re.compile(
    rf"(bin/)?{PROGRAM}|lib/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\.so(\.[0-9]+)*|licenses/[A-Za-z0-9][A-Za-z0-9_.+-]*\.txt"
)
MOST_ARCHIVE_BYTES = 128 << 20
MOST_BYTES = 512 << 20  # unpacked
MOST_MEMBERS = 64


def read_archive(path: Path, platforms: Sequence[str] = ()) -> bytes:
    """Returns the archive's bytes after checking them.

    platforms: platforms that the build is for. Raises BadRequest if the archive cannot be read, is too large, is for
    another processor, or holds anything but a runner's regular files: `mobizo-runner`, `bin/mobizo-runner`, libraries
    in `lib/`, and `licenses/`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_ARCHIVE_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read ({error.strerror})") from error
    if len(data) > MOST_ARCHIVE_BYTES:
        raise BadRequest(f"{path} is over {MOST_ARCHIVE_BYTES >> 20} MiB; strip the runner and its libraries")
    try:
        names, header = _contents(data)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadRequest(f"{path} is not a whole .tar.gz: {error}") from error
    if PROGRAM not in names:
        raise BadRequest(f"{path} has no {PROGRAM} at its top; `mobizo-agent build-runner` makes such an archive")
    for platform in platforms:
        if machine := wrong_machine(header, platform):
            raise BadRequest(f"{path} is for {machine}, and {platform} cannot run it; correct --platform")
    return data


def _too_much() -> BadRequest:
    return BadRequest(f"the archive unpacks to more than {MOST_BYTES >> 20} MiB or {MOST_MEMBERS} files")


def _contents(data: bytes) -> tuple[set[str], bytes]:
    """Names of all members, and the runner's first bytes. Reads to the end, whose checksum tells a torn archive."""
    names: set[str] = set()
    header = b""
    with (
        gzip.GzipFile(fileobj=BytesIO(data)) as unpacked,
        tarfile.open(fileobj=unpacked, mode="r|") as archive,
    ):
        for member in archive:
            if unpacked.tell() + member.size > MOST_BYTES or len(names) == MOST_MEMBERS:
                raise _too_much()
            if not member.isreg() or not MEMBER.fullmatch(member.name):
                raise BadRequest(
                    f"the archive holds {member.name[:100]!r}; it may hold {PROGRAM}, bin/{PROGRAM}, lib/*.so* and "
                    "licenses/*.txt, as regular files"
                )
            if member.name in names:
                raise BadRequest(f"the archive holds {member.name!r} twice")
            names.add(member.name)
            if member.name == PROGRAM:
                content: IO[bytes] = archive.extractfile(member)  # type: ignore[assignment]  # a regular file has it
                header = content.read(HEADER_BYTES)
        while unpacked.read(CHUNK_BYTES):
            if unpacked.tell() > MOST_BYTES:
                raise _too_much()
    return names, header
