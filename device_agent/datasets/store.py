"""The data sets in the agent's home.

data/NAME               a link to the current version, so that one rename replaces all its files
data/.versions/NAME.X/  train.jsonl, validation.jsonl, test.jsonl and about.json, which never change

A version to which no name links is removed, as soon as no job holds it. Directories have mode 0700 and files 0600.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from device_agent.datasets.splits import SplitRule
from device_agent.durable import locked, read_document, write_document
from shared.durable import sync
from shared.errors import BadRequest, Conflict, InvalidDataset, MobizoError, NotFound, Unavailable
from shared.job import NAME
from shared.strict_model import StrictModel
from shared.zo.encoding import read_jsonl

ABOUT = "about.json"


class DatasetAbout(StrictModel):
    """What the agent knows of a data set without reading its records."""

    changed_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    shares: tuple[int, int, int] = Field(description="percent of train, validation and test")
    seed: int
    records: dict[str, int] = Field(description="by split")
    fields: tuple[str, ...] = Field(description="fields of any record, sorted")

    @property
    def rule(self) -> SplitRule:
        """The rule by which records were split."""
        return SplitRule(self.shares, self.seed)


def check_directory(directory: Path) -> None:
    """Checks without reading records. Raises InvalidDataset unless `directory` can be a data set."""
    if not (directory / "train.jsonl").is_file():
        raise InvalidDataset(f"{directory} has no train.jsonl; a data set is a directory with one")


class DatasetRemoved(Unavailable, title="Data set removed"):
    """This device no longer has the data set."""

    def __init__(self, name: str) -> None:
        """name: the data set's."""
        super().__init__(f"data set {name!r} was removed from this device; the job is released")


@dataclass(frozen=True)
class HeldDataset:
    """A data set while a job uses it."""

    name: str
    path: Path  # of the data set; a link if it belongs to the home
    directory: Path  # of one version, which stays as it is even if the name gets another one

    @property
    def is_removed(self) -> bool:
        """Whether the owner has removed the data set."""
        return not (self.path / "train.jsonl").is_file()


class DatasetStore:
    """The data sets in one directory. Readers need no lock; one process at a time changes them."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._versions = self.path / ".versions"

    def directories(self) -> dict[str, Path]:
        """Returns the directory of each data set by name, sorted."""
        paths = self.path.iterdir() if self.path.exists() else ()
        links = sorted(path for path in paths if re.fullmatch(NAME, path.name) and path.is_symlink())
        return {path.name: path for path in links if (path / "train.jsonl").is_file()}

    def directory(self, name: str) -> Path:
        """Returns the directory of a data set. Raises NotFound."""
        directory = self.directories().get(name)
        if directory is None:
            raise NotFound(f"the agent's home has no data set {name!r}; `mobizo-agent data list` shows its data sets")
        return directory

    def about(self, name: str) -> DatasetAbout:
        """Returns the facts of a data set. Raises NotFound, and MobizoError if its about.json is damaged."""
        path = self.directory(name) / ABOUT
        damaged = MobizoError(f"{path} cannot be read; add the data set again with --replace")
        about = read_document(path, DatasetAbout, damaged)
        if about is None:
            raise damaged
        return about

    def records(self, name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the records of a split with their places. Raises NotFound, and InvalidDataset for a damaged file."""
        return read_jsonl(self.directory(name) / f"{split}.jsonl")

    @contextmanager
    def hold(self, name: str) -> Iterator[HeldDataset]:
        """Holds the current version of a data set, so that no process removes it. Raises DatasetRemoved."""
        held, descriptor = self._hold(name)
        try:
            yield held
        finally:
            os.close(descriptor)
            self.remove_unreferenced()

    def _hold(self, name: str) -> tuple[HeldDataset, int]:
        """Returns a data set and the descriptor whose lock holds it."""
        while True:  # until no other process replaces the version between the two steps
            path = self.directories().get(name)
            if path is None:
                raise DatasetRemoved(name)
            held = HeldDataset(name, path, path.resolve())
            with suppress(FileNotFoundError):
                descriptor = os.open(held.directory, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if (held.directory / "train.jsonl").is_file():
                    return held, descriptor
                os.close(descriptor)

    def remove_unreferenced(self) -> None:
        """Removes versions that lost their name while a job held them, unless another process changes the store."""
        if self._versions.is_dir():
            with suppress(Conflict, OSError), self.changing():
                pass

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock for changes and removes what a killed process left behind. Raises Conflict if it is held."""
        self._versions.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)
        held = Conflict("another `mobizo-agent data` command changes the data sets; wait until it ends")
        with locked(self.path / ".lock", held):
            self._sweep()
            yield

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """Yields a new, empty version of a data set, which is removed afterwards unless it was published."""
        path = self._versions / f"{name}.{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            self._sweep()

    def publish(self, name: str, version: Path, about: DatasetAbout) -> None:
        """Makes a version, whose files are synced, the data set of this name in one rename."""
        write_document(version / ABOUT, about)
        sync(self._versions)
        target, link = self.path / name, self.path / f".{name}.link"
        if target.exists() and not target.is_symlink():
            raise BadRequest(f"{target} is not a data set that this agent wrote; move it away")
        link.unlink(missing_ok=True)
        link.symlink_to(version.relative_to(self.path))
        link.replace(target)
        sync(self.path)

    def remove(self, name: str) -> None:
        """Removes a data set. Raises NotFound."""
        path = self.directory(name)
        path.unlink()
        sync(self.path)
        self._sweep()

    def _sweep(self) -> None:
        """Removes the versions to which no name links and that no job holds. The caller holds the lock."""
        for link in self.path.glob(".*.link"):
            link.unlink()
        used = {path.resolve() for path in self.path.iterdir() if path.is_symlink()}
        for version in self._versions.iterdir():
            if version.resolve() not in used:
                descriptor = os.open(version, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(version)
                except BlockingIOError:
                    continue
                finally:
                    os.close(descriptor)


class AvailableDatasets:
    """Data sets of the home, looked up each time, and those named with --data, which take precedence."""

    def __init__(self, store: DatasetStore, directories: Mapping[str, Path]) -> None:
        """Raises BadRequest if a named directory lies in the store: it would have a second name and privacy budget."""
        for name, directory in directories.items():
            if directory.is_relative_to(store.path.resolve()):
                raise BadRequest(f"--data {name}={directory} lies in the agent's home, whose data sets need no --data")
        self._store, self._named_directories = store, dict(directories)

    def directories(self) -> dict[str, Path]:
        """Returns the directory of each data set by name."""
        return self._store.directories() | self._named_directories

    @contextmanager
    def hold(self, name: str) -> Iterator[HeldDataset]:
        """Yields a data set for a job. A data set of the home keeps its version; one named with --data is read in
        place. Raises DatasetRemoved.
        """
        directory = self._named_directories.get(name)
        if directory is None:
            with self._store.hold(name) as held:
                yield held
        else:
            held = HeldDataset(name, directory, directory)
            if held.is_removed:
                raise DatasetRemoved(name)
            yield held
