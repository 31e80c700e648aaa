"""Packs and unpacks a runner as a .tar.gz: `mobizo-runner` at its top and its libraries in `lib/`.

A bundle (bundle.cmake) also has the runner itself in `bin/`, a loader in `lib/`, and `licenses/`.

Archives are reproducible: they contain no times, owners or directory order.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import IO

from device_agent.runner.location import PROGRAM
from shared.errors import Untrusted

MEMBER = re.compile(
    rf"(bin/)?{PROGRAM}|lib/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\.so(\.[0-9]+)*|licenses/[A-Za-z0-9][A-Za-z0-9_.+-]*\.txt"
)
MOST_BYTES = 512 << 20  # unpacked
MOST_MEMBERS = 64


def pack_runner(directory: Path, target: Path) -> None:
    """Writes the runner in `directory` as an archive to `target`."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    temporary = target.with_name(target.name + ".new")
    with (
        temporary.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in names:
            if not MEMBER.fullmatch(name):
                continue
            member = tarfile.TarInfo(name)
            member.size = (directory / name).stat().st_size
            executable = name == PROGRAM or bool((directory / name).stat().st_mode & 0o100)
            member.mode = 0o755 if executable else 0o644
            with (directory / name).open("rb") as file:
                archive.addfile(member, file)
    temporary.replace(target)


def unpack_runner(archive: Path, directory: Path) -> None:
    """Unpacks an archive into `directory`, which must not exist.

    Only regular files with the names of a runner are written. Raises Untrusted if the archive contains anything else,
    is too large, or has no runner.
    """
    directory.mkdir(parents=True)
    total = 0
    try:
        with tarfile.open(archive, mode="r:gz") as packed:
            for count, member in enumerate(packed, start=1):
                total += member.size
                if not member.isreg() or not MEMBER.fullmatch(member.name):
                    raise Untrusted(f"the runner's archive holds {member.name[:100]!r}, which no runner has")
                if total > MOST_BYTES or count > MOST_MEMBERS:
                    raise Untrusted(
                        f"the runner's archive unpacks to more than {MOST_BYTES >> 20} MiB or too many files"
                    )
                content: IO[bytes] = packed.extractfile(member)  # type: ignore[assignment]  # a regular file has it
                target = directory / member.name
                target.parent.mkdir(exist_ok=True)
                with content, target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                # A bundled dynamic loader is executed like the runner; set-user-ID and the like are never kept.
                target.chmod(0o755 if member.name == PROGRAM or member.mode & 0o100 else 0o644)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, FileExistsError) as error:
        raise Untrusted(f"the runner's archive cannot be unpacked: {error}") from error
    if not (directory / PROGRAM).is_file():
        raise Untrusted(f"the runner's archive holds no {PROGRAM}")
