"""One run's directory on a phone, and the runner that works in it independently of the link.

The directory contains the files of docs/runner.md and these:

    out, err        the runner's output since its last start
    keeper, runner  process ids: of the shell that waits for the runner, and of the runner
    status          the runner's exit status, once it has ended
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from device_agent.android.adb import Adb
from device_agent.android.phone import RUNNER

MOST_BYTES = 1 << 20  # of output in one poll
ABSENT = 9  # exit status of a poll if the directory does not exist
GRACE_SECONDS = 10  # until the runner is killed, which loses at most the current step

# Finds the processes of the run in $PWD by their command line, because process ids are reused. $(cat) drops the zero
# bytes between arguments.
_FIND = """\
of() {
  case "$(cat /proc/$1/cmdline 2>/dev/null)" in
    *--run"$PWD"--program*) runner=$1;;
    *"cd $PWD;"*) keeper=$1;;
  esac
}
runner= keeper=
for p in $(cat keeper runner 2>/dev/null); do of $p; done
[ -n "$keeper$runner" ] || for p in $(pidof %s); do of $p; done
""".replace("%s", RUNNER)


@dataclass(frozen=True)
class RemoteRunState:
    """The state of a run on the phone.

    alive: whether a runner works there. status: exit status of a finished runner, if known. ledger_size: bytes. out:
    the runner's output from the requested byte on.
    """

    alive: bool = False
    status: int | None = None
    ledger_size: int = 0
    out: bytes = b""


class PhoneRun:
    """A run's directory on the phone."""

    def __init__(self, adb: Adb, directory: str) -> None:
        self.adb, self.directory = adb, directory

    @property
    def ledger(self) -> str:
        """The trajectory."""
        return f"{self.directory}/trajectory.bin"

    def create(self) -> None:
        """Creates the directory."""
        self.adb.run(f"umask 077; mkdir -p {self.directory}")

    def look(self, start: int) -> RemoteRunState:
        """Returns the run's state, with at most MOST_BYTES of output from byte `start` on."""
        # Liveness is checked first, so that the output of a finished runner is complete.
        result = self.adb.shell(
            f"cd {self.directory} 2>/dev/null || exit {ABSENT}\n{_FIND}"
            '[ -n "$keeper$runner" ] && echo alive || echo dead\n'
            "cat status 2>/dev/null || echo\nstat -c %s trajectory.bin 2>/dev/null || echo 0\n"
            f"tail -c +{start + 1} out 2>/dev/null | head -c {MOST_BYTES}"
        )
        if result.status == ABSENT:
            return RemoteRunState()
        alive, status, size, out = result.out.split(b"\n", 3)
        return RemoteRunState(alive == b"alive", int(status) if status else None, int(size), out)

    def start(self, runner: str, program: str, weights: str) -> None:
        """Starts a runner that trains until it exits by itself, whether or not the link stays up. No other may be
        alive.
        """
        options = f"--run {self.directory} --program {program} --weights {weights} --packed {weights}.packed"
        keep = (
            f"cd {self.directory}; echo $$ >keeper; LD_LIBRARY_PATH={runner}/lib "
            f"{runner}/{RUNNER} train {options} </dev/null >>out 2>>err & "
            "echo $! >runner; wait $!; echo $? >status.new; mv status.new status"
        )
        # Returns once `runner` exists, so that a poll never sees neither process.
        self.adb.run(
            f"cd {self.directory} && umask 077 && rm -f keeper runner status && : >out && : >err || exit 1\n"
            f"setsid sh -c '{keep}' </dev/null >/dev/null 2>&1 &\n"
            "while [ ! -s runner ]; do sleep 0.05; done"
        )

    def stop(self) -> None:
        """Asks the runner to exit after its current call and waits; kills it after GRACE_SECONDS."""
        self.adb.run(
            # A runner that is starting is a keeper first.
            f"cd {self.directory} 2>/dev/null || exit 0\nfor n in 1 2 3 4 5; do\n{_FIND}"
            '[ -z "$keeper" -o -n "$runner" ] && break; sleep 0.2\ndone\n'
            '[ -n "$runner" ] || exit 0\nkill -TERM $runner 2>/dev/null\n'
            f"n={GRACE_SECONDS * 10}\n"
            "while [ $n -gt 0 ] && [ -d /proc/$runner ]; do sleep 0.1; n=$((n-1)); done\n"
            "kill -KILL $runner 2>/dev/null; true",
            GRACE_SECONDS + 10,
        )

    def clear_output(self) -> None:
        """Truncates the output of a finished runner, so that its final message is not read again."""
        self.adb.run(f"cd {self.directory} && : >out && rm -f status")

    def clear_checkpoints(self) -> None:
        """Removes the checkpoints, which belong to a trajectory that is being replaced."""
        self.adb.run(f"rm -rf {self.directory}/checkpoints")

    def error_output(self) -> str:
        """Returns the end of the runner's standard error."""
        return self.adb.shell(f"tail -c 300 {self.directory}/err").out.decode(errors="replace").strip()

    def begins_with(self, ledger: bytes) -> bool:
        """Returns whether the phone's trajectory starts with `ledger`."""
        output = self.adb.shell(f"head -c {len(ledger)} {self.ledger} 2>/dev/null | sha256sum").out.split()
        return output[:1] == [hashlib.sha256(ledger).hexdigest().encode()]

    def remove(self) -> None:
        """Removes the run from the phone."""
        self.adb.run(f"rm -rf {self.directory}")
