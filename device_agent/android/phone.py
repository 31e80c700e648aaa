"""mobizo's files on a phone, in one directory that other apps cannot read.

files/SHA256           programs and weights, pushed once for all jobs
files/SHA256.packed    weights as the runner packed them, and their index
runner/SHA256/         a runner and its libraries, by the hash of all their files
incoming/              files that are being pushed; files elsewhere are complete
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from device_agent.android.adb import Adb, PhoneUnreachable, PhoneUnsuitable
from device_agent.errors import DoesNotFit, RuntimeFailed
from shared.canonical import file_sha256
from shared.errors import Unavailable, Untrusted

ROOT = "/data/local/tmp/mobizo"
RUNNER = "mobizo-runner"
HASH_SECONDS = 600.0  # timeout for hashing a file on the phone
SPARE_BYTES = 16 << 20  # left free on the phone
KEPT_BYTES = 8 << 30  # of files and runners
NO_EXECUTION = (
    "the phone mounts /data/local/tmp with noexec, so no runner can start there; use another phone or system image"
)
EXEC_FAILED = (126, 127)  # a shell's exit statuses for a program that does not start


class Phone:
    """mobizo's directory on the phone behind `adb`."""

    def __init__(self, adb: Adb) -> None:
        self.adb = adb
        self.pushed_bytes = 0  # by this object

    def file(self, sha256: str) -> str:
        """Returns the path of the file with this content."""
        return f"{ROOT}/files/{sha256}"

    def open(self) -> None:
        """Creates the directories. Raises DoesNotFit or RuntimeFailed."""
        subdirectories = "mkdir -p files runner incoming"
        self.adb.run(f"umask 077; mkdir -p {ROOT} && cd {ROOT} && chmod 700 . && {subdirectories}")

    def keep(self, local: Path, sha256: str) -> str:
        """Returns the phone's path of `local`'s content, pushing it if necessary.

        Raises DoesNotFit, RuntimeFailed, or Untrusted if `local` has another hash.
        """
        remote, size = self.file(sha256), local.stat().st_size
        # Keep mtime: the runner matches packed weights by it.
        used = f"touch -ca {remote} {remote}.packed {remote}.packed.index"
        if self.adb.shell(f"{used}; stat -c %s {remote}").stdout.strip() != str(size).encode():
            self.put(local, sha256, remote)
        return remote

    def install_runner(self, directory: Path) -> str:
        """Returns the phone's directory of a runner, pushing it if necessary and checking that it starts.

        Raises DoesNotFit, RuntimeFailed, Untrusted, or PhoneUnsuitable.
        """
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {path.relative_to(directory).as_posix(): file_sha256(path) for path in paths}
        listing = "".join(f"{sha256}  {name}\n" for name, sha256 in files.items())
        remote = f"{ROOT}/runner/{hashlib.sha256(listing.encode()).hexdigest()}"
        if self.adb.shell(f"touch -c {remote}; test -d {remote}").returncode == 0:
            return remote
        staging = f"{ROOT}/incoming/runner"
        folders = {str(Path(name).parent) for name in files}
        self.adb.run(f"rm -rf {staging}; mkdir -p {staging}; cd {staging} && mkdir -p {' '.join(sorted(folders))}")
        self._check_executes(f"{staging}/probe")
        for name, sha256 in files.items():
            self.put(directory / name, sha256, f"{staging}/{name}")
        self.adb.run(f"chmod -R u+rwx {staging}")
        self._check_starts(staging)
        self.adb.run(f"mv {staging} {remote} && sync")
        return remote

    def put(self, local: Path, sha256: str, remote: str) -> None:
        """Pushes a file: to a temporary name, verified by hash, then renamed. Raises like `keep`."""
        size = local.stat().st_size
        self._check_space(size)
        staging = f"{ROOT}/incoming/{sha256}"
        try:
            self.adb.push(local, staging)
            self.pushed_bytes += size
            pushed_sha256 = self.adb.run(f"sha256sum {staging}", HASH_SECONDS).split()[0]
            if pushed_sha256 != sha256:
                if file_sha256(local) != sha256:
                    raise Untrusted(f"{local} has changed; remove it, so that it is downloaded again")
                raise PhoneUnreachable(f"{local.name} was damaged on the way to the phone; check the cable")
            self.adb.run(f"chmod 600 {staging} && sync && mv {staging} {remote}", HASH_SECONDS)
        except DoesNotFit:
            self.adb.shell(f"rm -f {staging}")
            raise

    def clean(self, keep: Collection[str] = (), max_bytes: int = KEPT_BYTES) -> None:
        """Removes the least recently used files and runners beyond `max_bytes`, and unfinished pushes.

        keep: names (hashes) of files and runners to keep.
        """
        self.adb.run(f"cd {ROOT} && rm -rf incoming/*")
        # A directory's access time is of no use, because `du` changes it.
        each = "[ -e $e ] && echo $(stat -c $t $e) $(du -ks $e)"
        loops = f"t=%X; for e in files/*; do {each}; done; t=%Y; for e in runner/*; do {each}; done; true"
        listing = self.adb.run(f"cd {ROOT} && {loops}")
        lines = (line.split() for line in listing.splitlines())
        entries = sorted(((int(used), name, int(kilobytes) << 10) for used, kilobytes, name in lines), reverse=True)
        total, excess = 0, []
        for _, name, size in entries:
            total += size
            if total > max_bytes and Path(name).name not in keep:
                excess.append(name)
                total -= size
        if excess:
            self.adb.run(f"cd {ROOT} && rm -rf {' '.join(excess)}")

    def _check_space(self, size: int) -> None:
        blocks, block = (int(word) for word in self.adb.run(f"stat -f -c '%a %S' {ROOT}").split())
        if size + SPARE_BYTES > blocks * block:
            raise DoesNotFit(
                f"the phone has {blocks * block >> 20} MB free and {size + SPARE_BYTES >> 20} MB are needed; "
                "free some storage on it"
            )

    def _check_executes(self, probe: str) -> None:
        # A file without a first line that names a shell: the shell that starts it runs it itself, if it may.
        result = self.adb.shell(f"echo : >{probe} && chmod 700 {probe} && {probe}; s=$?; rm -f {probe}; exit $s")
        if result.returncode in EXEC_FAILED:
            raise start_failure(result.stderr.decode(errors="replace"))

    def _check_starts(self, directory: str) -> None:
        result = self.adb.shell(f"cd {directory} && LD_LIBRARY_PATH=lib ./{RUNNER} version")
        message = result.stderr.decode(errors="replace").strip()
        if result.returncode in EXEC_FAILED:
            raise start_failure(message)
        if result.returncode != 0:
            raise RuntimeFailed(f"the runner does not start on this phone: {message[-300:]}")


def start_failure(output: str) -> Unavailable:
    """Returns the exception for a runner that the phone's shell could not start. output: its standard error."""
    if "ermission denied" in output:
        return PhoneUnsuitable(f"{NO_EXECUTION} ({output.strip()[-200:]})")
    return PhoneUnsuitable(
        f"the runner does not start on this phone ({output.strip()[-200:]}); "
        "install mobizo-runner-phone for its processor, or correct $MOBIZO_AGENT_RUNNER"
    )
