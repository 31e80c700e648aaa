"""A server and a device of one person, with their homes in one directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from device_agent.errors import NotEnrolled
from device_agent.home import HOME_VARIABLE, AgentHome
from mobizo import Client
from mobizo.quickstart.processes import AGENT, BIN, SERVER, Processes, run_command
from shared.durable import write_durably
from shared.errors import Unauthorized
from shared.protocol import EnrollmentRequest


class Site:
    """The homes `server` and `agent` in a directory. Later runs use their contents again."""

    def __init__(self, directory: Path, processes: Processes) -> None:
        self.directory, self._processes = directory, processes
        self.agent_home = AgentHome(directory / "agent")
        self._token_file = directory / "operator.token"
        homes = {"MOBIZO_HOME": str(directory / "server"), HOME_VARIABLE: str(self.agent_home.path)}
        self.env = os.environ | homes | {"PYTHONUNBUFFERED": "1"}
        self.url = ""

    def server(self, *arguments: str) -> Any:
        """Runs a command of `mobizo-server` that prints one JSON value, and returns the value. Raises MobizoError."""
        return json.loads(run_command([SERVER, *arguments, "--json"], self.env))

    def set_up(self) -> bool:
        """Creates the server's home unless it exists, and a token of its operator. Returns whether it is new."""
        if new := not (self.directory / "server" / "keys").is_dir():
            self._write_token(self.server("init")["token"])
        elif not self._token_file.is_file():  # a set-up that was interrupted
            self._new_token()
        return new

    def start_server(self, workers: int = 1) -> None:
        """Starts the server on a free loopback port. Its commands may be used meanwhile."""
        self._processes.start("server", [SERVER, "run", "--port", "0", "--workers", str(workers)], self.env)

    def connect(self) -> Client:
        """Waits for the server and returns its operator's client, which the caller closes."""
        self.url = self._processes.server_url()
        client = Client(self.url, self._token_file.read_text().strip())
        try:
            client.bases.list()
        except Unauthorized:  # the token has expired
            client.close()
            self._new_token()
            client = Client(self.url, self._token_file.read_text().strip())
        return client

    def start_device(self, client: Client, name: str, user: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Enrolls the device for a user unless it is enrolled, and starts `mobizo-agent run` with these arguments."""
        try:
            config = self.agent_home.config()
        except NotEnrolled:
            token = client.devices.create_enrollment_token(EnrollmentRequest(users=[user])).token
            run_command([AGENT, "enroll", "--server", self.url, "--token", token, "--name", name], self.env)
        else:
            if config.server != self.url:  # the same server, on another port
                updated_config = config.model_copy(update={"server": self.url})
                write_durably(self.agent_home.path / "config.json", updated_config.model_dump_json(indent=1).encode())
        return self._processes.start("agent", [AGENT, "run", *arguments], self.env)

    def write_environment(self) -> Path:
        """Writes a file of shell variables that make the commands use this server and device; returns its path."""
        variables = {
            "MOBIZO_HOME": self.env["MOBIZO_HOME"],
            HOME_VARIABLE: self.env[HOME_VARIABLE],
            "MOBIZO_SERVER": self.url,
            "MOBIZO_PORT": self.url.rpartition(":")[2],
            "MOBIZO_TOKEN": self._token_file.read_text().strip(),
        }
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        lines.append(f"export PATH={shlex.quote(str(BIN))}:$PATH\n")
        path = self.directory / "env.sh"
        write_durably(path, "\n".join(lines).encode())
        return path

    def _new_token(self) -> None:
        self._write_token(self.server("token", "create", "--role", "operator", "--name", "site")["token"])

    def _write_token(self, token: str) -> None:
        write_durably(self._token_file, token.encode())
