"""One run's directory on a phone, and the runner that works in it by itself. Knows no plan and no message.

Beside the files of docs/runner.md it holds

    out, err        what the runner says, of its last start
    keeper, runner  process ids: of the shell that waits for the runner, and of the runner
    status          the runner's exit status, once it has ended
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from device_agent.adb import Adb
from device_agent.phone import RUNNER

MOST_BYTES = 1 << 20  # of output in one look
ABSENT = 9  # exit status of a look at nothing
GRACE_SECONDS = 10  # then it is killed, which costs at most the step in progress

# The processes that belong to the run in $PWD, found by their command line: a process id may be another's by now.
# $(cat) drops the zero bytes between arguments.
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
class Look:
    """What a look at the run found.

    alive: whether a runner works there. status: a dead one's exit status, if it was seen. ledger_size: in bytes.
    out: the runner's output from the asked byte on.
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

    def make(self) -> None:
        """Makes the directory."""
        self.adb.say(f"umask 077; mkdir -p {self.directory}")

    def look(self, start: int) -> Look:
        """The run as it is, with at most MOST_BYTES of its output from byte `start` on."""
        # Whether it lives is asked first: the output of one that is dead is whole then.
        done = self.adb.shell(
            f"cd {self.directory} 2>/dev/null || exit {ABSENT}\n{_FIND}"
            '[ -n "$keeper$runner" ] && echo alive || echo dead\n'
            "cat status 2>/dev/null || echo\nstat -c %s trajectory.bin 2>/dev/null || echo 0\n"
            f"tail -c +{start + 1} out 2>/dev/null | head -c {MOST_BYTES}"
        )
        if done.status == ABSENT:
            return Look()
        alive, status, size, out = done.out.split(b"\n", 3)
        return Look(alive == b"alive", int(status) if status else None, int(size), out)

    def start(self, runner: str, program: str, weights: str) -> None:
        """Has a runner train here until it ends by itself, whatever becomes of the link. None may be alive here."""
        options = f"--run {self.directory} --program {program} --weights {weights}"
        keep = (
            f"cd {self.directory}; echo $$ >keeper; LD_LIBRARY_PATH={runner}/lib "
            f"{runner}/{RUNNER} train {options} </dev/null >>out 2>>err & "
            "echo $! >runner; wait $!; echo $? >status.new; mv status.new status"
        )
        # Once `runner` is there, a look sees the keeper, and never a moment in which nothing seems to be alive.
        self.adb.say(
            f"cd {self.directory} && umask 077 && rm -f keeper runner status && : >out && : >err || exit 1\n"
            f"setsid sh -c '{keep}' </dev/null >/dev/null 2>&1 &\n"
            "while [ ! -s runner ]; do sleep 0.05; done"
        )

    def stop(self) -> None:
        """Asks the runner to end after its call in progress, and waits for that; kills it after GRACE_SECONDS."""
        self.adb.say(
            # One that is being started is a keeper first.
            f"cd {self.directory} 2>/dev/null || exit 0\nfor n in 1 2 3 4 5; do\n{_FIND}"
            '[ -z "$keeper" -o -n "$runner" ] && break; sleep 0.2\ndone\n'
            '[ -n "$runner" ] || exit 0\nkill -TERM $runner 2>/dev/null\n'
            f"n={GRACE_SECONDS * 10}\n"
            "while [ $n -gt 0 ] && [ -d /proc/$runner ]; do sleep 0.1; n=$((n-1)); done\n"
            "kill -KILL $runner 2>/dev/null; true",
            GRACE_SECONDS + 10,
        )

    def forget_words(self) -> None:
        """Empties the output of a runner that has ended, so that its last word is not heard again."""
        self.adb.say(f"cd {self.directory} && : >out && rm -f status")

    def complaint(self) -> str:
        """The end of what the runner wrote to standard error."""
        return self.adb.shell(f"tail -c 300 {self.directory}/err").out.decode(errors="replace").strip()

    def begins_with(self, ledger: bytes) -> bool:
        """Whether the phone's ledger is `ledger`, perhaps with more behind it."""
        told = self.adb.shell(f"head -c {len(ledger)} {self.ledger} 2>/dev/null | sha256sum").out.split()
        return told[:1] == [hashlib.sha256(ledger).hexdigest().encode()]

    def remove(self) -> None:
        """Removes the run from the phone."""
        self.adb.say(f"rm -rf {self.directory}")
