"""A phone for tests: a real adbd behind a network of its own, and the real adb client that reaches it."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.device_agent.android import packages

INIT = Path(__file__).with_name("phone_init.py")
SECONDS = 20.0


class Phone:
    """Processes in their own namespaces. `adb` is the client's command, which works inside the phone's network."""

    def __init__(self, directory):
        """directory: an empty one, for the client. Raises packages.Missing."""
        for tool in ("unshare", "nsenter", "mount", "ip"):
            if shutil.which(tool) is None:
                raise packages.Missing(f"{tool} is not on this machine, so a phone has no network of its own")
        self.root = packages.phone_root()
        own_user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        spaces = ("--net", "--mount", "--pid", "--fork", "--kill-child", *own_user)
        command, pipe = ["unshare", *spaces, sys.executable, "-I", INIT, self.root], subprocess.PIPE
        log = directory / "phone.log"
        with log.open("wb") as errors:
            self._init = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        if self._init.stdout.readline() != "ready\n":
            self._init.communicate()
            raise packages.Missing(f"this machine gives no namespaces for a phone: {log.read_text().strip()[-300:]}")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(children[0])
        self.home = directory / "home"
        self.home.mkdir()
        # The vsock that adbd listens on beside TCP is the machine's own, so ports differ between sessions.
        self.port = 20_000 + self.pid % 10_000 * 2
        self.serial = f"127.0.0.1:{self.port}"
        self._user = ("--user", "--preserve-credentials") if own_user else ()
        enter = ["nsenter", "--target", str(self.pid), "--net", *self._user]
        program, environment = packages.client(self.root)
        environment |= {"HOME": str(self.home), "TMPDIR": str(self.home), "ANDROID_ADB_SERVER_PORT": "5037"}
        words = ["exec", *enter, "env", *(f"{name}={value}" for name, value in environment.items()), str(program)]
        self.adb = directory / "adb"
        self.adb.write_text(f'#!/bin/sh\n{shlex.join(words)} "$@"\n')
        self.adb.chmod(0o755)

    def path(self, remote):
        """A path on the phone, as this machine sees it."""
        return Path(f"/proc/{self.pid}/root") / self.root.relative_to("/") / Path(remote).relative_to("/")

    def begin(self):
        """Starts the one adbd of a test."""
        self._ports = []
        self.start()

    def end(self):
        """Ends what a test left running, and removes what it left, but for the files that any test may push again."""
        for port in tuple(self._ports):
            self.kill(port)
        self.run("kill -9 $(pidof mobizo-runner); sleep 0.1; rm -rf /data/local/tmp/mobizo/incoming")
        self.run("cd /data; for e in *; do [ $e = local ] || rm -rf $e; done")
        self.client("disconnect")

    def empty(self):
        """Removes all that mobizo keeps."""
        self.run("rm -rf /data/local/tmp/mobizo")

    def start(self, port=None):
        """Starts adbd, and connects the client to it."""
        port = port or self.port
        self._say(f"start {port}")
        self._ports.append(port)
        self.connect(port)

    def kill(self, port=None):
        """Kills adbd -9."""
        port = port or self.port
        self._say(f"kill {port}")
        self._ports.remove(port)

    def connect(self, port):
        """Has the client's server reach an adbd, as soon as it listens."""
        deadline = time.monotonic() + SECONDS
        while True:
            output = self.client("connect", f"127.0.0.1:{port}")
            if "connected to" in output or time.monotonic() > deadline:
                break
            time.sleep(0.05)

    def client(self, *arguments):
        """What adb says to a command."""
        process = subprocess.run([self.adb, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
        return process.stdout + process.stderr

    def run(self, script):
        """What a script says in the phone's own shell, without adb."""
        return subprocess.run([*self.shell, script], capture_output=True, text=True, check=False).stdout

    @property
    def shell(self):
        """The command of the phone's own shell; a script follows."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", *self._user, "chroot", str(self.root)]
        return [*enter, "/usr/bin/env", "PATH=/usr/bin", "/bin/sh", "-c"]

    def close(self):
        self.client("kill-server")
        self._init.stdin.close()
        self._init.wait()
        self._init.stdout.close()

    def _say(self, line):
        self._init.stdin.write(line + "\n")
        self._init.stdin.flush()
        assert self._init.stdout.readline() == "done\n"
