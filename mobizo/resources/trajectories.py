"""`client.trajectories`: the recorded training run of a version, and LoRA-B after any of its steps."""

from __future__ import annotations

from pathlib import Path

from mobizo.adapter_paths import find_version, version_path
from mobizo.connection import Resource
from mobizo.downloads import DownloadProgress, download_file
from shared.protocol import AdapterVersion, PeftFile, TrajectoryView


class Trajectories(Resource):
    """Trajectories of adapter versions. A version has one if the job asked for it and the device's owner allowed it.

    revision: as in `client.adapters`. All methods raise AdapterNotFound and RevisionNotFound, and NotFound if the
    version has no trajectory.
    """

    def get(self, name: str, revision: str | int = "main") -> TrajectoryView:
        """Returns the size, the number of steps and the verification state of a version's trajectory."""
        return self._view(find_version(self._connection, name, revision))

    def download(
        self, name: str, target: Path, revision: str | int = "main", *, progress: DownloadProgress | None = None
    ) -> TrajectoryView:
        """Writes a version's trajectory to the file `target` and returns its description.

        progress: called with the file name, the bytes so far and the bytes in total. Raises Untrusted if the received
        bytes do not have the sha256 that the server states.
        """
        version = find_version(self._connection, name, revision)
        view = self._view(version)
        target.parent.mkdir(parents=True, exist_ok=True)
        file = PeftFile(path=target.name, size=view.size, sha256=view.sha256)
        download_file(self._connection, f"{version_path(version)}/trajectory.bin", file, target, progress)
        return view

    def _view(self, version: AdapterVersion) -> TrajectoryView:
        return self._connection.get(TrajectoryView, f"{version_path(version)}/trajectory")
