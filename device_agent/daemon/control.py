"""The daemon's control socket, a Unix socket for this user only: one JSON line per request and response.

`ControlServer` is the daemon's side and `ask` the command line's.
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

from device_agent.home import DaemonStatus
from shared.errors import BadRequest, MobizoError

PATH_BYTES = 107  # maximum length of a socket's path, without the terminating zero
LINE_BYTES = 1 << 20
TIMEOUT_SECONDS = 5.0  # for a peer that does not answer

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_log = structlog.get_logger()


class NotRunning(MobizoError):
    """No agent runs in this home; start one with `mobizo-agent run`."""

    code, title = "not-running", "Not running"


class ControlRequest(BaseModel):
    """A request to the daemon. lines: number of log lines from the end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ask: Literal["status", "pause", "resume", "stop", "logs"]
    lines: int = Field(50, ge=1, le=1000)


class ControlResponse(BaseModel):
    """The response to a `ControlRequest`; `error` is set if the request failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str | None = None
    paused: bool = False
    status: DaemonStatus | None = None
    lines: tuple[str, ...] = ()


Handler = Callable[[ControlRequest], ControlResponse]


class ControlServer:
    """Context manager that answers requests one at a time from its own thread."""

    def __init__(self, path: Path, handler: Handler) -> None:
        """handler: called in the server's thread. The caller must hold the home's lock, so that an existing socket
        is stale.

        Raises BadRequest if the socket cannot be created.
        """
        self._path, self._handler = path, handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            # Set before bind, so that the file never exists with another mode.
            os.fchmod(self._listener.fileno(), 0o600)
            with _address(path) as address:
                self._listener.bind(address)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise BadRequest(f"{path} cannot be created ({error}); set another home with --home") from error
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def __enter__(self) -> ControlServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._woken)
        self._thread.join(TIMEOUT_SECONDS)
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
                    peer.settimeout(TIMEOUT_SECONDS)
                    peer.sendall(self._answer(peer).model_dump_json().encode() + b"\n")
            except OSError as error:
                _log.warning("a client of the control socket disconnected", detail=str(error))

    def _answer(self, peer: socket.socket) -> ControlResponse:
        line = _line(peer)  # read in any case, because closing a socket with unread data would lose the response
        if _peer_uid(peer) not in (os.geteuid(), 0):
            return ControlResponse(error="this agent answers only its own user")
        try:
            return self._handler(ControlRequest.model_validate_json(line))
        except ValidationError:
            return ControlResponse(error="unknown request; the agent may be of another version than this command")
        except MobizoError as error:
            return ControlResponse(error=error.detail)
        except Exception:
            # A failed request must not end the server's thread.
            _log.exception("the control socket's handler failed")
            return ControlResponse(error="the request failed; see the agent's log")


def ask(path: Path, request: ControlRequest) -> ControlResponse:
    """Sends a request and returns the response. Raises NotRunning, or MobizoError if the daemon refuses or does not
    response.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        try:
            with _address(path) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunning from error
        except OSError as error:
            raise MobizoError(f"{path}: {error}") from error
        try:
            connection.sendall(request.model_dump_json().encode() + b"\n")
            response = ControlResponse.model_validate_json(_line(connection))
        except (OSError, ValidationError) as error:
            raise MobizoError(f"the agent does not answer on {path} ({type(error).__name__})") from error
    if response.error is not None:
        raise MobizoError(response.error)
    return response


def _line(connection: socket.socket) -> bytes:
    """Reads up to the end of the first line, at most LINE_BYTES."""
    data = b""
    while not data.endswith(b"\n") and len(data) < LINE_BYTES:
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data


def _peer_uid(peer: socket.socket) -> int:
    """Returns the user id of the peer, as reported by the kernel."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yields a socket address for `path`, through a descriptor of its directory if the path is too long."""
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
