"""The daemon's local control socket: one JSON line in, one out, for this user alone. Never a TCP port.

`ControlServer` is the daemon's half, `ask` the command line's, `Pause` a person's "not now", which outlives both.
Knows no training.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from device_agent.state import Status
from shared.errors import BadRequest, MobizoError

PATH_BYTES = 107  # that a socket's address holds before its closing zero
LINE_BYTES = 1 << 20
PATIENCE_SECONDS = 5.0  # with a peer that says nothing
PAUSED = "paused by a person; `mobizo-agent resume` goes on"

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_log = structlog.get_logger()


class NotRunning(MobizoError):
    """No agent works in this home; start one with `mobizo-agent run`."""

    code, title = "not-running", "Not running"


class Question(BaseModel):
    """What a person asks of the daemon. lines: of the log's end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ask: Literal["status", "pause", "resume", "stop", "logs"]
    lines: int = Field(50, ge=1, le=1000)


class Answer(BaseModel):
    """What the daemon says to a `Question`; `error` is set if it could not be understood."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str | None = None
    paused: bool = False
    status: Status | None = None
    lines: tuple[str, ...] = ()


Handler = Callable[[Question], Answer]


class Pause:
    """A person's "not now": a file in the home, so that it holds over restarts and needs no daemon to be told."""

    def __init__(self, home: Path) -> None:
        self._path = home / "paused"

    def __bool__(self) -> bool:
        return self._path.exists()

    def why(self) -> str | None:
        """Why training is to wait, in words; None if nobody asked for that."""
        return PAUSED if self else None

    def begin(self) -> None:
        """Training is to wait from its next look at the rules on."""
        self._path.touch(0o600)

    def end(self) -> None:
        """Training may go on."""
        self._path.unlink(missing_ok=True)


class ControlServer:
    """Answers on a socket from a thread of its own, one peer at a time, between `with` and its end."""

    def __init__(self, path: Path, handler: Handler) -> None:
        """handler: called in that thread. Whoever makes a server holds the home's lock: a socket found is a dead one's.

        Raises BadRequest if the socket cannot be made.
        """
        self._path, self._handler = path, handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            # Before bind: the file is never there with another mode.
            os.fchmod(self._listener.fileno(), 0o600)
            with _address(path) as address:
                self._listener.bind(address)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise BadRequest(f"{path} cannot be made ({error}); give another home with --home") from error
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def __enter__(self) -> ControlServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._woken)
        self._thread.join(PATIENCE_SECONDS)
        os.close(self._wake)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener.fileno(), self._wake], [], [])
            if self._wake in ready:
                return
            try:
                peer, _ = self._listener.accept()
                with peer:
                    peer.settimeout(PATIENCE_SECONDS)
                    peer.sendall(self._answer(peer).model_dump_json().encode() + b"\n")
            except OSError as error:
                _log.warning("a peer of the control socket went away", detail=str(error))

    def _answer(self, peer: socket.socket) -> Answer:
        line = _line(peer)  # read in any case: closing a socket with something unread would lose the answer
        if _peer_uid(peer) not in (os.geteuid(), 0):
            return Answer(error="this agent answers to its own user only")
        try:
            return self._handler(Question.model_validate_json(line))
        except ValidationError:
            return Answer(error="the question is not understood; is the agent of another version than this command?")
        except MobizoError as error:
            return Answer(error=error.detail)
        except Exception:
            # A question must not end the thread that answers the next one.
            _log.exception("a question broke the control socket's handler")
            return Answer(error="the agent failed at this question; its log says how")


def ask(path: Path, question: Question) -> Answer:
    """The daemon's answer. Raises NotRunning if there is no daemon, MobizoError if it refuses or does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        try:
            with _address(path) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunning from error
        except OSError as error:
            raise MobizoError(f"{path}: {error}") from error
        try:
            connection.sendall(question.model_dump_json().encode() + b"\n")
            answer = Answer.model_validate_json(_line(connection))
        except (OSError, ValidationError) as error:
            raise MobizoError(f"the agent does not answer on {path} ({type(error).__name__})") from error
    if answer.error is not None:
        raise MobizoError(answer.error)
    return answer


def _line(connection: socket.socket) -> bytes:
    """What comes up to the first line's end, at most LINE_BYTES."""
    data = b""
    while not data.endswith(b"\n") and len(data) < LINE_BYTES:
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data


def _peer_uid(peer: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """An address for the socket at `path`: by its directory's descriptor where the path is too long for one."""
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
