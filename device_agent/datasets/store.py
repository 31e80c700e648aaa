"""The data sets in the agent's home.

data/NAME               a link to the current version, so that one rename replaces all its files
data/.versions/NAME.X/  train.jsonl, validation.jsonl, test.jsonl and about.json; unreferenced versions are removed

Directories have mode 0700 and files 0600.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.datasets.formats import Format, Located, Source
from device_agent.datasets.splits import SplitRule
from device_agent.durable import sync_directory, write_durably
from shared.errors import BadRequest, Conflict, InvalidDataset, MobizoError, NotFound
from shared.job import NAME

ABOUT = "about.json"


class DatasetAbout(BaseModel):
    """What the agent knows of a data set without reading its records."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    if not directory.is_dir():
        raise InvalidDataset(f"{directory} is not a directory; a data set is a directory with a train.jsonl")
    if not (directory / "train.jsonl").is_file():
        raise InvalidDataset(f"{directory} has no train.jsonl, which every data set needs")


class DatasetStore:
    """The data sets in one directory. Readers need no lock; one process at a time changes them."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._versions = self.path / ".versions"

    def directories(self) -> dict[str, Path]:
        """Returns the directory of each data set by name, sorted."""
        try:
            links = sorted(path for path in self.path.iterdir() if re.fullmatch(NAME, path.name) and path.is_symlink())
        except FileNotFoundError:
            return {}
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
        try:
            return DatasetAbout.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise MobizoError(f"{path} cannot be read; add the data set again with --replace") from error

    def records(self, name: str, split: str) -> Iterator[Located]:
        """Yields the records of a split with their places. Raises NotFound, and InvalidDataset for a damaged file."""
        source = Source(self.directory(name) / f"{split}.jsonl", Format.JSONL, None, "utf-8")
        with source.path.open("rb") as raw:
            yield from source.records(raw)

    def owns(self, directory: Path) -> bool:
        """Returns whether a resolved directory lies in the store."""
        return directory.is_relative_to(self.path.resolve())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the lock for changes and removes what a killed process left behind. Raises Conflict if it is held."""
        self._versions.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sweep()
            yield
        except BlockingIOError as error:
            raise Conflict("another `mobizo-agent data` command changes the data sets; wait until it ends") from error
        finally:
            os.close(descriptor)

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
        write_durably(version / ABOUT, about.model_dump_json(indent=1).encode())
        sync_directory(self._versions)
        target, link = self.path / name, self.path / f".{name}.link"
        if target.exists() and not target.is_symlink():
            raise BadRequest(f"{target} is not a data set that this agent wrote; move it away")
        link.unlink(missing_ok=True)
        link.symlink_to(version.relative_to(self.path))
        link.replace(target)
        sync_directory(self.path)

    def remove(self, name: str) -> None:
        """Removes a data set. Raises NotFound."""
        path = self.directory(name)
        path.unlink()
        sync_directory(self.path)
        self._sweep()

    def _sweep(self) -> None:
        """Removes the versions to which no name links. The caller holds the lock."""
        for link in self.path.glob(".*.link"):
            link.unlink()
        used = {path.resolve() for path in self.path.iterdir() if path.is_symlink()}
        for version in self._versions.iterdir():
            if version.resolve() not in used:
                shutil.rmtree(version)


class AvailableDatasets(Mapping[str, Path]):
    """Data sets of the home, looked up each time, and those named with --data, which take precedence."""

    def __init__(self, store: DatasetStore, directories: Mapping[str, Path]) -> None:
        """Raises BadRequest if a named directory lies in the store: it would have a second name and privacy budget."""
        for name, directory in directories.items():
            if store.owns(directory):
                raise BadRequest(f"--data {name}={directory} lies in the agent's home, whose data sets need no --data")
        self._store, self._named_directories = store, dict(directories)

    def _directories(self) -> dict[str, Path]:
        return self._store.directories() | self._named_directories

    def __getitem__(self, name: str) -> Path:
        return self._directories()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._directories())

    def __len__(self) -> int:
        return len(self._directories())
