"""The first process of a phone for tests, in network, mount and process namespaces of its own: `phone_init.py ROOT`.

Mounts what the phone needs, then starts and kills adbd's as lines on standard input say: `start PORT`, `kill PORT`.
Answers each with a line. Ends with standard input, and the kernel ends whatever still runs on the phone.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

STORAGE = "128m"  # the phone's whole storage
ADBD = "/usr/lib/android-sdk/platform-tools/adbd"


def say(word):
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def reap(*_):
    # Orphans of adbd become this process's children.
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def start_adbd(root, port):
    child = os.fork()
    if child == 0:
        log = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(log, descriptor)
        os.setsid()
        os.chroot(root)
        os.chdir("/")
        place = {"PATH": "/usr/bin", "HOME": "/data", "TMPDIR": "/data/local/tmp", "SHELL": "/bin/sh"}
        os.execve(ADBD, [ADBD], place | {"ADBD_PORT": str(port)})
    return child


def main(root):
    mounts = (
        ("--bind", root, root),
        ("-o", "remount,bind,ro", root),
        ("-t", "proc", "proc", root / "proc"),
        ("-t", "tmpfs", "-o", f"size={STORAGE},mode=0771", "data", root / "data"),
        ("-t", "tmpfs", "tmp", root / "tmp"),
        ("--rbind", "/dev", root / "dev"),
    )
    for mount in mounts:
        subprocess.run(["mount", *mount], check=True)
    (root / "data" / "local" / "tmp").mkdir(parents=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.signal(signal.SIGCHLD, reap)
    running = {}
    say("ready")
    for line in sys.stdin:
        word, port = line.split()
        if word == "start":
            running[port] = start_adbd(root, int(port))
        else:
            os.kill(running.pop(port), signal.SIGKILL)
        say("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
