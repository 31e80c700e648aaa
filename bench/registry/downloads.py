"""`bench registry`, downloads: a PEFT directory by the Hub-compatible route, as a ratio to nginx on the same files.

One adapter of TinyLlama's shape (D = 6.3 million), with a random B. Each download fetches every file of the directory;
see `bench.server.downloads` for the sources.
"""

import tempfile
from pathlib import Path

import numpy as np
from huggingface_hub import HfApi

from bench.registry.publish import JOB, Device, publish
from bench.result import Measured
from bench.server.downloads import against_nginx
from bench.server.home import TINYLLAMA, add_devices, client, make_home, new_token, running
from server.settings import Delivery, Settings
from server.storage.directory import DiskArtifacts
from shared.access import DEFAULT_TENANT, Role

DOWNLOADS, QUICK_DOWNLOADS = 40, 8  # at once
ROUNDS, QUICK_ROUNDS = 5, 1  # of races and of snapshots
SEED = 6
REPOSITORY = f"{DEFAULT_TENANT}/{JOB['adapter']}"
Files = tuple[tuple[str, int, str], ...]  # path, bytes, sha256


def measure(quick: bool) -> Measured:
    """Returns a row for each source, and the ratios of median times."""
    downloads, rounds = (QUICK_DOWNLOADS, QUICK_ROUNDS) if quick else (DOWNLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as name:
        settings = make_home(Path(name), TINYLLAMA, delivery=Delivery.ACCEL)
        token = new_token(settings, Role.APP)
        with running(settings) as (url, process):
            revision, files = publish_directory(settings, url, token)
            sets = (hub_paths(files, revision),), (plain_paths(files),)
            rows, claims = against_nginx(settings, (url, process.pid), token, sets, downloads, rounds)
    claims.pop("download_rss_bytes", None)
    return [row | {"files": len(files)} for row in rows], claims


def publish_directory(settings: Settings, url: str, token: str) -> tuple[str, Files]:
    """Publishes an adapter; returns its revision and the files of its PEFT directory."""
    (credentials,) = add_devices(settings, 1)
    with client(url, token) as app, Device(url, credentials) as device:
        publish(app, device, np.random.default_rng(SEED), deviation=0.01)
    info = HfApi(url, token).model_info(REPOSITORY, files_metadata=True)
    files = [(file.rfilename, file.size, file.lfs and file.lfs.sha256) for file in info.siblings or ()]
    whole = tuple((path, size, sha256) for path, size, sha256 in files if size is not None and sha256 is not None)
    if len(whole) != len(files) or info.sha is None:
        raise RuntimeError(f"the listing is incomplete: {files}")
    return info.sha, whole


def hub_paths(files: Files, revision: str) -> tuple[tuple[str, int], ...]:
    """Returns path and bytes of each file by the Hub's route."""
    return tuple((f"/{REPOSITORY}/resolve/{revision}/{path}", size) for path, size, _ in files)


def plain_paths(files: Files) -> tuple[tuple[str, int], ...]:
    """Returns path and bytes of each file in the store."""
    return tuple((f"/{DiskArtifacts.name(sha256)}", size) for _, size, sha256 in files)
