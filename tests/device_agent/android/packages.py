"""A phone's software for tests: Debian's adbd with Android's own shell (mksh) and tools (toybox), unpacked privately.

Nothing is installed. The packages come through apt from the mirror that this machine already uses, with its own lists,
so apt checks their signatures; only the suite is another: the one that has an adbd for plain Linux.
"""

import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

SUITE = "trixie"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = ("adbd", "adb", "mksh", "toybox")
TOOLS = Path("usr/lib/android-sdk/platform-tools")
LIBRARIES = ("usr/lib/{triple}", "usr/lib/{triple}/android")


class Missing(Exception):
    """This machine cannot give a phone; says what it lacks."""


def phone_root():
    """The directory of the phone's root file system, made once and kept in the user's cache.

    Raises Missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mobizo-tests"
    root = cache / f"phone-{SUITE}-1"
    if not root.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="aside-", dir=cache) as aside:
            staging = Path(aside) / "root"
            _unpack(Path(aside), staging)
            _arrange(staging, root)
            try:
                staging.rename(root)
            except OSError:
                if not root.exists():  # else another session was faster
                    raise
    return root


def client(root):
    """The adb client in `root`: the command and the environment that it needs."""
    triple = _triple(root)
    libraries = os.pathsep.join(str(root / place.format(triple=triple)) for place in LIBRARIES)
    return root / TOOLS / "adb", {"LD_LIBRARY_PATH": libraries}


def _unpack(aside, target):
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not on this machine, so Debian's adbd cannot be unpacked")
    if not KEYRING.exists():
        raise Missing(f"{KEYRING} is not on this machine, so Debian's packages cannot be checked")
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (aside / name).mkdir(parents=True)
    (aside / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {SUITE} main\n")
    options = {
        "Dir::Etc::sourcelist": aside / "sources.list",
        "Dir::Etc::sourceparts": aside / "parts",
        "Dir::State::lists": aside / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": aside / "cache",
        "APT::Sandbox::User": "root",
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    install = ("install", "--yes", "--no-install-recommends", "--download-only", *PACKAGES)
    for command in (("update",), install):
        process = subprocess.run(["apt-get", "-q", *settings, *command], capture_output=True, text=True, check=False)
        if process.returncode != 0:
            raise Missing(f"apt cannot fetch Debian {SUITE}'s adbd: {(process.stdout + process.stderr).strip()[-300:]}")
    target.mkdir()
    for package in sorted((aside / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)


def _mirror():
    """The Debian mirror that this machine's own sources name."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    mirror = next((line for line in lines if line.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        raise Missing("this machine's apt sources name no Debian mirror, and only Debian packages an adbd for Linux")
    return mirror


def _arrange(root, final):
    """Makes a root file system of the unpacked packages: links, mount points, Android's tools by their names.

    final: where it will lie.
    """
    for name in ("bin", "lib", "lib64", "sbin"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "dev", "data", "tmp"):
        (root / name).mkdir(exist_ok=True)
    triple = _triple(root)
    loader = root / "usr" / "lib" / triple / _interpreter(root / TOOLS / "adb").rsplit("/", 1)[1]
    path = ":".join(str(root / place.format(triple=triple)) for place in LIBRARIES)
    toybox = root / "usr" / "bin" / "toybox"
    names = subprocess.run(
        [loader, "--library-path", path, toybox], capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        link = root / "usr" / "bin" / name
        if not link.exists():
            link.symlink_to("toybox")
    (root / "usr" / "bin" / "sh").unlink(missing_ok=True)
    (root / "usr" / "bin" / "sh").symlink_to("mksh")
    _set_interpreter(root / TOOLS / "adb", str(final / loader.relative_to(root)))


def _triple(root):
    return next(path.parent.name for path in (root / "usr" / "lib").glob("*/android"))


def _interpreter_header(data):
    """Offset of the ELF program header (64-bit, little-endian) that names the loader."""
    (start,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    headers = (start + index * size for index in range(count))
    return next(at for at in headers if struct.unpack_from("<I", data, at)[0] == 3)


def _interpreter(program):
    data = program.read_bytes()
    at = _interpreter_header(data)
    (offset,), (size,) = struct.unpack_from("<Q", data, at + 8), struct.unpack_from("<Q", data, at + 32)
    return data[offset : offset + size].rstrip(b"\0").decode()


def _set_interpreter(program, loader):
    """Has a program start by another loader: adb starts its own server by its own name, so no wrapper would do."""
    data = bytearray(program.read_bytes())
    at, name = _interpreter_header(data), loader.encode() + b"\0"
    struct.pack_into("<Q", data, at + 8, len(data))
    struct.pack_into("<QQ", data, at + 32, len(name), len(name))
    program.write_bytes(data + name)
