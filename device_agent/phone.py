"""What mobizo keeps on a phone, under one directory that no other app can look into:

    files/SHA256            programs, weights: pushed once, whatever job needs them
    runner/SHA256/          a runner and its libraries, by the hash of them all
    runs/JOB/               a run's directory (docs/runner.md), and what starts and follows it
    aside/                  what is being pushed: a name outside it is a whole file of that content

Knows no plan, no ledger and no training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from device_agent.adb import Adb, PhoneAway, PhoneFull, PhoneRefused, WrongProcessor
from shared.canonical import file_sha256
from shared.errors import Untrusted

ROOT = "/data/local/tmp/mobizo"
RUNNER = "mobizo-runner"
HASH_SECONDS = 600.0  # most for the phone to hash what it got
SPARE_BYTES = 16 << 20  # left free on the phone
KEPT_BYTES = 8 << 30  # of files and runners
KEPT_DAYS = 30  # of runs whose agent never came back
EXEC_FAILED = (126, 127)  # a shell's statuses for a program that does not start

_PLAIN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_PLACE = re.compile(r"^(/[A-Za-z0-9][A-Za-z0-9._-]*)+$")


class Phone:
    """One directory on the phone behind `adb`."""

    def __init__(self, adb: Adb, root: str = ROOT) -> None:
        """root: an absolute path of plain names, for the phone's shell to take as it is."""
        if not _PLACE.match(root):
            raise ValueError(f"{root!r} is no absolute path of plain names")
        self.adb, self.root = adb, root
        self.pushed_bytes = 0  # so far, by this object

    def run(self, job_id: str) -> str:
        """The directory of a job's run."""
        name = job_id if _PLAIN.match(job_id) else hashlib.sha256(job_id.encode()).hexdigest()
        return f"{self.root}/runs/{name}"

    def file(self, sha256: str) -> str:
        """Where the file of that content lies."""
        return f"{self.root}/files/{sha256}"

    def open(self) -> None:
        """Makes the directories. Raises PhoneFull or PhoneRefused."""
        made = "mkdir -p files runner runs aside"
        self.adb.say(f"umask 077; mkdir -p {self.root} && cd {self.root} && chmod 700 . && {made}")

    def keep(self, local: Path, sha256: str) -> str:
        """Where the phone has the content of `local`, which is pushed if it lacks it.

        Raises PhoneFull, PhoneRefused, or Untrusted if `local` is not that content.
        """
        remote, size = self.file(sha256), local.stat().st_size
        if self.adb.shell(f"touch -c {remote}; stat -c %s {remote}").out.strip() != str(size).encode():
            self.put(local, sha256, remote)
        return remote

    def keep_runner(self, directory: Path) -> str:
        """The phone's directory of a runner, which is pushed if the phone lacks it, and seen to start.

        Raises PhoneFull, PhoneRefused, Untrusted, or WrongProcessor.
        """
        files = {path.relative_to(directory).as_posix(): file_sha256(path) for path in _files(directory)}
        listing = "".join(f"{sha256}  {name}\n" for name, sha256 in files.items())
        remote = f"{self.root}/runner/{hashlib.sha256(listing.encode()).hexdigest()}"
        if self.adb.shell(f"touch -c {remote}; test -d {remote}").status == 0:
            return remote
        aside = f"{self.root}/aside/runner"
        self.adb.say(f"rm -rf {aside}; mkdir -p {aside}/lib")
        for name, sha256 in files.items():
            self.put(directory / name, sha256, f"{aside}/{name}")
        self.adb.say(f"chmod -R u+rwx {aside}")
        self._check_starts(aside)
        self.adb.say(f"mv {aside} {remote} && sync")
        return remote

    def put(self, local: Path, sha256: str, remote: str) -> None:
        """Pushes a file: aside, then hashed there, then renamed. Raises as `keep` does."""
        size = local.stat().st_size
        self._check_room(size)
        aside = f"{self.root}/aside/{sha256}"
        try:
            self.adb.push(local, aside)
            self.pushed_bytes += size
            found = self.adb.say(f"sha256sum {aside}", HASH_SECONDS).split()[0]
            if found != sha256:
                _check(local, sha256)
                raise PhoneAway(f"{local.name} arrived on the phone as another file; look at the cable")
            self.adb.say(f"chmod 600 {aside} && sync && mv {aside} {remote}", HASH_SECONDS)
        except PhoneFull:
            self.adb.shell(f"rm -f {aside}")
            raise

    def fetch(self, remote: str, local: Path) -> None:
        """Copies a file from the phone: aside, then held to the phone's hash, then renamed.

        Raises PhoneRefused.
        """
        size, sha256 = self.adb.say(f"stat -c %s {remote} && sha256sum {remote}", HASH_SECONDS).split()[:2]
        aside = local.with_name(local.name + ".new")
        self.adb.pull(remote, aside, int(size))
        if file_sha256(aside) != sha256:
            aside.unlink()
            raise PhoneAway(f"{local.name} arrived from the phone as another file; look at the cable")
        aside.replace(local)

    def match(self, local: Path, remote: str) -> None:
        """Makes the phone's file the same as `local`, if it is not. Raises as `keep` does."""
        sha256 = file_sha256(local)
        if self.adb.shell(f"sha256sum {remote} 2>/dev/null").out.split()[:1] != [sha256.encode()]:
            self.put(local, sha256, remote)

    def clean(self, keep: Collection[str] = (), most_bytes: int = KEPT_BYTES, days: int = KEPT_DAYS) -> None:
        """Removes files and runners over `most_bytes`, the longest unused first, and runs untouched for `days`.

        keep: names (hashes) of files and runners that stay.
        """
        old = f"find runs -mindepth 1 -maxdepth 1 -mtime +{days}"
        self.adb.say(f"cd {self.root} && rm -rf aside/* && {old} | while read e; do rm -rf $e; done")
        each = "[ -e $e ] && echo $(stat -c %Y $e) $(du -ks $e)"
        listed = self.adb.say(f"cd {self.root} && for e in files/* runner/*; do {each}; done; true")
        lines = (line.split() for line in listed.splitlines())
        entries = sorted(((int(used), name, int(kilobytes) << 10) for used, kilobytes, name in lines), reverse=True)
        total, over = 0, []
        for _, name, size in entries:
            total += size
            if total > most_bytes and Path(name).name not in keep:
                over.append(name)
                total -= size
        if over:
            self.adb.say(f"cd {self.root} && rm -rf {' '.join(over)}")

    def _check_room(self, size: int) -> None:
        blocks, block = (int(word) for word in self.adb.say(f"stat -f -c '%a %S' {self.root}").split())
        if size + SPARE_BYTES > blocks * block:
            raise PhoneFull(
                f"the phone has {blocks * block >> 20} MB free and {size + SPARE_BYTES >> 20} MB are needed; "
                "free some storage on it"
            )

    def _check_starts(self, directory: str) -> None:
        done = self.adb.shell(f"cd {directory} && LD_LIBRARY_PATH=lib ./{RUNNER} version")
        if done.status in EXEC_FAILED:
            raise WrongProcessor(
                f"the runner does not start on this phone ({done.err.strip()[-200:]}); "
                "build it for the phone's processor (docs/android.md)"
            )
        if done.status != 0:
            raise PhoneRefused(f"the runner does not start on this phone: {done.err.strip()[-300:]}")


def _files(directory: Path) -> Iterable[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _check(local: Path, sha256: str) -> None:
    if file_sha256(local) != sha256:
        raise Untrusted(f"{local} is not the file that it was; remove it and it is downloaded again")
