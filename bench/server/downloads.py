"""`bench server`, downloads: many downloads of weights at once, as a ratio to nginx on the same files, in turns.

`stream` is `mobizo-server run`, which checks in its database who may download a file. `accel` is an nginx with
deploy/nginx.conf in front of it, without TLS. `nginx` serves the files without any check. The client is curl, in two
processes: a client in Python would be slower than the servers. Memory is the server's highest resident set, bytes.
"""

import random
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.result import Measurement, Row
from bench.runner import peak_memory, time_by_turns
from bench.server.home import client, job, make_home, new_token, running_server, submit
from server.database.database import Database
from server.schema import programs
from server.settings import Delivery, Settings
from server.storage.directory import DiskArtifacts
from server.storage.opening import open_artifacts
from shared.access import Role
from tests.server.nginx import Missing, free_ports, nginx

DOWNLOADS, QUICK_DOWNLOADS = 200, 50
FILE_BYTES, FILES = 25_000_000, 4
ROUNDS, QUICK_ROUNDS = 3, 1
CLIENTS = 2  # processes
NGINX_CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
SEED = 5
FileSets = tuple[tuple[tuple[str, int], ...], ...]


@dataclass(frozen=True)
class Source:
    """A server of files. sets: each download fetches the files of one set, in turn; path and bytes of each file."""

    name: str
    port: int
    sets: FileSets
    token: str = ""

    def files(self, downloads: int) -> list[tuple[str, int]]:
        """Returns path and bytes of every file of some downloads."""
        return [file for number in range(downloads) for file in self.sets[number % len(self.sets)]]


def measure(quick: bool) -> Measurement:
    """Returns a row for each source, and the ratios of their median times."""
    downloads, rounds = (QUICK_DOWNLOADS, QUICK_ROUNDS) if quick else (DOWNLOADS, ROUNDS)
    with tempfile.TemporaryDirectory() as directory:
        settings = make_home(Path(directory), delivery=Delivery.ACCEL)
        with running_server(settings) as (url, process):
            token, files = _publish(settings, url)
            paths = tuple(((f"/v1/files/{file}", FILE_BYTES),) for file in files)
            plain_paths = tuple(((f"/{DiskArtifacts.name(file)}", FILE_BYTES),) for file in files)
            return against_nginx(settings, (url, process.pid), token, (paths, plain_paths), downloads, rounds)


def against_nginx(
    settings: Settings,
    server: tuple[str, int],
    token: str,
    sets: tuple[FileSets, FileSets],
    downloads: int,
    rounds: int,
) -> Measurement:
    """Races the three sources. server: URL and process id. sets: of the server, and of the files on disk."""
    url, pid = server
    port, (paths, plain_paths) = int(url.rpartition(":")[2]), sets
    idle = peak_memory(pid)
    try:
        with nginx_in_front(settings.home.parent, settings, port) as (plain_port, accel_port):
            nginx_alone = Source("nginx", plain_port, plain_paths)
            sources = (nginx_alone, Source("stream", port, paths, token), Source("accel", accel_port, paths, token))
            seconds = time_downloads(sources, downloads, rounds)
    except Missing as error:
        return [{"what": "downloads", "skipped": str(error)}], {}
    size = sum(size for _, size in nginx_alone.files(downloads))
    rows: list[Row] = [
        {
            "what": "downloads",
            "by": name,
            "downloads": downloads,
            "bytes": size,
            "seconds": statistics.median(times),
            "all_seconds": times,
            "bytes_per_second": size / statistics.median(times),
        }
        for name, times in seconds.items()
    ]
    rows.append({"what": "memory while downloading", "before_bytes": idle, "peak_rss_bytes": peak_memory(pid)})
    ratios = [row["seconds"] / rows[0]["seconds"] for row in rows[:3]]
    claims = {"download_vs_nginx": ratios[1], "download_accel_vs_nginx": ratios[2]}
    return rows, claims | {"download_rss_bytes": float(rows[-1]["peak_rss_bytes"])}


def _publish(settings: Settings, url: str) -> tuple[str, list[str]]:
    """Adds large files to a program; returns a token that may download them, and their sha256."""
    token, rng = new_token(settings, Role.APP), random.Random(SEED)
    with client(url, token) as app:
        recipe_id = submit(app, job())["recipe_id"]
    artifacts, database = open_artifacts(settings), Database(settings.url)
    files = [artifacts.put(rng.randbytes(FILE_BYTES)) for _ in range(FILES)]
    with database.writing() as session:
        for number, sha256 in enumerate(files):
            file = {"role": f"extra{number}", "name": f"{number}.ptd", "sha256": sha256}
            session.add(programs.ProgramBlob(recipe_id=recipe_id, version=1, **file))
    database.close()
    return token, files


@contextmanager
def nginx_in_front(root: Path, settings: Settings, port: int) -> Iterator[tuple[int, int]]:
    """Runs an nginx. Yields the port without checks, and the port that asks the server first. Raises Missing."""
    if shutil.which("curl") is None:
        raise Missing("the downloads need the program curl")
    objects = settings.artifacts_path / "objects"
    plain_port, accel_port, unused_port = free_ports(3)
    config = NGINX_CONFIG.read_text()
    for original, replacement in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{port};"),
        ("listen 80;", f"listen 127.0.0.1:{unused_port};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{accel_port};"),
        ("/var/lib/mobizo/server/artifacts/objects/;", f"{objects}/;"),
        ("limit_conn mobizo_downloads 32;", ""),  # all clients have one address
    ):
        if config.count(original) != 1:
            raise RuntimeError(f"deploy/nginx.conf does not contain {original!r} exactly once")
        config = config.replace(original, replacement)
    config = re.sub(r"^ *ssl_.*\n", "", config, flags=re.MULTILINE)
    static = f"server {{ listen 127.0.0.1:{plain_port}; location / {{ alias {objects}/; }} }}\n"
    with nginx(root / "nginx", static + config, plain_port):
        yield plain_port, accel_port


def time_downloads(sources: tuple[Source, ...], downloads: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round by source; the sources take turns."""
    return time_by_turns(rounds, {source.name: partial(_download, source, downloads) for source in sources})


def _download(source: Source, downloads: int, _number: int) -> None:
    """Downloads everything at once with curl. Raises RuntimeError if bytes are missing."""
    files = source.files(downloads)
    command = ["curl", "--no-progress-meter", "--fail", "--parallel", "--parallel-immediate", "--config", "-"]
    command += ["--parallel-max", str(max(downloads // CLIENTS, 1)), "--write-out", "%{size_download}\n"]
    command += ["--header", f"Authorization: Bearer {source.token}"] if source.token else []
    url = f"http://127.0.0.1:{source.port}"
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)
    ]
    for number, process in enumerate(clients):
        assert process.stdin is not None
        process.stdin.writelines(f'url = "{url}{path}"\noutput = /dev/null\n' for path, _ in files[number::CLIENTS])
        process.stdin.close()
        process.stdin = None
    received = [int(line) for process in clients for line in process.communicate()[0].splitlines()]
    if sorted(received) != sorted(size for _, size in files):
        raise RuntimeError(f"{source.name} did not send all files")
