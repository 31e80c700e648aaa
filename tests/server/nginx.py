"""A real nginx for tests: this machine's own, or Debian's, unpacked privately. Nothing is installed."""

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PACKAGES = ("nginx", "libpcre2-8-0")  # what else nginx links, Python links, too
PATIENCE = 30


class Missing(Exception):
    """This machine cannot give an nginx; says what it lacks."""


def nginx_program():
    """The command, and the environment it needs; made once and kept in the user's cache.

    Raises Missing.
    """
    own = shutil.which("nginx")
    if own is not None:
        return Path(own), {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mobizo-tests"
    root = cache / "nginx-1"
    if not root.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="aside-", dir=cache) as aside:
            directory = Path(aside) / "root"
            _unpack(Path(aside), directory)
            try:
                directory.rename(root)
            except OSError:
                if not root.exists():  # else another session was faster
                    raise
    program = root / "usr" / "sbin" / "nginx"
    environment = {"LD_LIBRARY_PATH": str(root / "usr" / "lib" / f"{platform.machine()}-linux-gnu")}
    try:
        process = subprocess.run(
            [program, "-v"], env=os.environ | environment, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise Missing(f"the unpacked nginx does not start here: {error}") from error
    if process.returncode != 0:
        raise Missing(f"the unpacked nginx does not start here: {process.stderr.strip()[-300:]}")
    return program, environment


def _unpack(aside, directory):
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"there is no nginx, and no {tool} to fetch it with")
    for name in ("lists/partial", "cache/archives/partial"):
        (aside / name).mkdir(parents=True)
    options = {"Dir::State::lists": aside / "lists", "Dir::Cache": aside / "cache", "APT::Sandbox::User": "root"}
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for command in (("update",), ("download", *PACKAGES)):
        process = subprocess.run(
            ["apt-get", "-q", *settings, *command], cwd=aside, capture_output=True, text=True, check=False
        )
        if process.returncode != 0:
            raise Missing(f"apt cannot fetch nginx: {(process.stdout + process.stderr).strip()[-300:]}")
    directory.mkdir()
    for package in sorted(aside.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, directory], check=True)


@contextlib.contextmanager
def nginx(directory, servers, port):
    """nginx with these `server` blocks and the like, until the context ends. port: one that they listen to.

    Raises Missing.
    """
    program, environment = nginx_program()
    directory.mkdir(exist_ok=True)
    (directory / "nginx.conf").write_text(_main(directory, servers))
    log = directory / "error.log"
    command = [program, "-c", directory / "nginx.conf", "-e", log, "-p", directory]
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"nginx did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait()


def _main(directory, servers):
    places = "".join(
        f"    {name}_temp_path {directory}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
    )
    # As this user, since the files are this user's.
    user = "user root;\n" if os.geteuid() == 0 else ""
    return f"""daemon off;
{user}worker_processes auto;
pid {directory}/pid;
events {{ worker_connections 2048; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
{places}{servers}
}}
"""


def free_ports(count):
    """Different ports that nobody listens to."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
