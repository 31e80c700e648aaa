"""The client's histories of versions: the trajectory of a run, and LoRA-B after any of its steps."""

from __future__ import annotations

from pathlib import Path

from mobizo.pulling import RAW_NAME, Progress, Pulling, version_address
from shared.protocol import AdapterVersion, PeftFile, TrajectoryView


class Histories(Pulling):
    """What came with a version whose device's owner allowed it."""

    def trajectory(self, name: str, revision: str | int = "main") -> TrajectoryView:
        """What is known of a version's trajectory. Raises NotFound where none came with it."""
        return TrajectoryView.model_validate(self._get(f"{version_address(self.version(name, revision))}/trajectory"))

    def pull_trajectory(
        self, name: str, target: Path, revision: str | int = "main", *, progress: Progress | None = None
    ) -> TrajectoryView:
        """Writes a version's trajectory to a file, checked by its hash."""
        version = self.version(name, revision)
        found = TrajectoryView.model_validate(self._get(f"{version_address(version)}/trajectory"))
        target.parent.mkdir(parents=True, exist_ok=True)
        file = PeftFile(path=target.name, size=found.size, sha256=found.sha256)
        self._fetch(f"{version_address(version)}/trajectory.bin", file, target, progress)
        return found

    def pull_step(self, name: str, step: int, target: Path, revision: str | int = "main") -> AdapterVersion:
        """Writes LoRA-B as it was after a step of the version's run, which the server makes of the trajectory.

        Raises NotFound where there is no trajectory, or none that was verified, or not so many steps.
        """
        version = self.version(name, revision)
        path = f"{version_address(version)}/steps/{step}/{RAW_NAME}"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fetch(path, self._told(path, target.name), target, None)
        return version
