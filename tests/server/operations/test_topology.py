"""The services of docker-compose.yml as processes, through a whole job in which a server and a worker are killed.

Each process has the command and the environment that the file gives its service; only names of places differ: hosts,
ports and directories. PostgreSQL and an S3 server run here in the place of their images.
"""

import base64
import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from server.settings import Settings
from shared.zo.lora import load_adapter
from tests.certificate import loopback_certificate
from tests.device_agent.tiny import write_base, write_records
from tests.server.operations.test_compose import ROOT, SERVICES

PATIENCE = 400  # only where something hangs
JOB = {
    "base": "tiny",
    "user": "alice",
    "adapter": "alice-movies",
    "task": "sst2",
    "dataset": "demo",
    "recipe": {"rank": 2, "queries": 2, "effective_batch": 4, "sequence_length": 40},
    "training": {"steps": 3000, "evaluation_interval": 1000},
}


class Balancer(socketserver.ThreadingTCPServer):
    """Passes connections on to the first of several ports that answers: what a name with two addresses does."""

    daemon_threads = True

    def __init__(self, ports):
        super().__init__(("127.0.0.1", 0), None)
        self._ports, self.port = ports, self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, link, address):
        for port in self._ports:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as upstream:
                back = threading.Thread(target=self._copy, args=(upstream, link), daemon=True)
                back.start()
                self._copy(link, upstream)
                back.join()
                return

    @staticmethod
    def _copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Topology:
    """The services of docker-compose.yml as processes; every line they log is kept."""

    def __init__(self, root, postgres, s3):
        self.root, self._processes = root, []
        self.secrets = root / "secrets"
        self.secrets.mkdir()
        (self.secrets / "database-password").write_text("d4tabase/p@ss:word\n")
        (self.secrets / "storage-secret").write_text("st0rage-secret\n")
        for secret, path in zip(("tls-cert", "tls-key"), loopback_certificate(self.secrets), strict=True):
            path.rename(self.secrets / secret)
        self._prepare(postgres)
        place = SERVICES["server"]["environment"]["MOBIZO_STORAGE_URL"]
        s3.client.create_bucket(Bucket=place.removeprefix("s3://"))
        self._places = {
            "@database:5432/mobizo": f"@/topology?host={postgres.root}",
            "http://storage:8333": s3.url,
            "/run/secrets": str(self.secrets),
            "/var/lib/mobizo": str(root / "state"),
            "0.0.0.0": "127.0.0.1",
            "=/data": f"={root / 'data'}",
        }

    def _prepare(self, postgres):
        """A database whose owner needs its password, as the image's."""
        password = (self.secrets / "database-password").read_text().strip()
        with postgres.administrator() as link:
            link.execute(f"CREATE ROLE mobizo LOGIN PASSWORD '{password}'")
            link.execute("CREATE DATABASE topology OWNER mobizo")
            access = Path(link.execute("SHOW hba_file").fetchone()[0])
            access.write_text("local all mobizo scram-sha-256\n" + access.read_text())
            link.execute("SELECT pg_reload_conf()")

    def _local(self, value):
        for name, state in self._places.items():
            value = value.replace(name, state)
        return value

    def environment(self, name, **changes):
        variables = {key: self._local(value) for key, value in SERVICES[name]["environment"].items()}
        return os.environ | variables | {"PYTHONWARNINGS": "ignore"} | changes

    def command(self, words):
        modules = {"mobizo-server": "server.cli.main", "mobizo-agent": "device_agent"}
        return [sys.executable, "-m", modules[words[0]], *(self._local(word) for word in words[1:])]

    def start(self, name, log, extra=(), **environment):
        """A service's process; what it says goes to a file."""
        with (self.root / f"{log}.log").open("ab") as log_file:
            process = subprocess.Popen(
                self.command([*SERVICES[name]["command"], *extra]),
                cwd=ROOT,
                env=self.environment(name, **environment),
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def call(self, name, words, **environment):
        """`docker compose run --rm NAME WORDS`."""
        process = subprocess.run(
            self.command(words),
            cwd=ROOT,
            env=self.environment(name, **environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def stop(self):
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def port(self, name):
        """Where a server says that it answers; None: not yet."""
        match = re.search(r"listening on https://\S+:(\d+)", self.log(name))
        return match and int(match[1])

    def log(self, name):
        return (self.root / f"{name}.log").read_text()


@pytest.fixture
def topology(tmp_path, postgres, s3):
    new_topology = Topology(tmp_path, postgres, s3)
    yield new_topology
    new_topology.stop()
    with postgres.administrator() as link:
        link.execute("DROP DATABASE topology WITH (FORCE)")
        link.execute("DROP ROLE mobizo")


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if value := condition():
                return value
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_whole_job_with_a_server_and_a_worker_killed(topology, tmp_path):
    (tmp_path / "data").mkdir()
    for seed, split in enumerate(("train", "validation", "test")):
        write_records(tmp_path / "data" / f"{split}.jsonl", 12, seed)
    write_base(tmp_path / "tiny")
    assert topology.start("migrate", "migrate").wait(PATIENCE) == 0
    initialized = json.loads(topology.call("server", ["mobizo-server", "init", "--json"]))
    # Only what takes time is shorter than docker-compose.yml leaves it.
    quick = {"MOBIZO_COMPILE_LEASE_SECONDS": "2", "MOBIZO_LEASE_SECONDS": "4"}
    servers = [topology.start("server", f"server-{number}", ["--port=0"], **quick) for number in range(2)]
    workers = {topology.start("worker", f"worker-{number}", **quick) for number in range(2)}
    topology.call("server", ["mobizo-server", "base", "add", "tiny", str(tmp_path / "tiny")])
    ports = [until(lambda number=number: topology.port(f"server-{number}")) for number in range(2)]
    balancer = Balancer(ports)
    url = f"https://127.0.0.1:{balancer.port}"
    trust = ssl.create_default_context(cafile=topology.secrets / "tls-cert")
    operator = {"Authorization": f"Bearer {initialized['token']}"}

    def ask(method, path, **body):
        # A connection each, as the servers behind the name come and go.
        answer = httpx.request(method, url + path, headers=operator, verify=trust, timeout=PATIENCE, **body)
        assert answer.status_code < 300, answer.text
        return answer

    for port in ports:
        until(lambda port=port: httpx.get(f"https://127.0.0.1:{port}/readyz", verify=trust).status_code == 200)
    job = ask("POST", "/v1/jobs", json=JOB).json()

    def state():
        return ask("GET", f"/v1/jobs/{job['id']}").json()

    # The worker that compiles is killed: the other one compiles it.
    engine = create_engine(Settings(**database_of(topology)).url)
    running_worker = text(
        "SELECT workers.pid FROM tasks JOIN workers ON workers.id = worker_id WHERE claim_id IS NOT NULL"
    )

    def compiling():
        with engine.connect() as connection:
            return connection.scalar(running_worker)

    (victim,) = [worker for worker in workers if worker.pid == until(compiling)]
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    tokens = [initialized["token"]]
    for number in range(2):
        once = ask("POST", "/v1/enrollments", json={"users": ["alice"]}).json()["token"]
        tokens.append(once)
        home = {"MOBIZO_AGENT_HOME": str(tmp_path / f"agent-{number}")}
        words = ["mobizo-agent", "enroll", f"--server={url}", f"--token={once}", f"--name=agent-{number}"]
        topology.call("agent", words, **home)
        topology.start("agent", f"agent-{number}", **home)
        tokens.append(json.loads((tmp_path / f"agent-{number}" / "config.json").read_text())["token"])
    # The server that everyone speaks to is killed while a device trains: the device goes on with the other.
    phase = until(lambda: (view := state())["result"] or (view["progress"] or {}).get("phase") == "training")
    assert phase is True, "the job ended before anything could be killed"
    servers[0].kill()
    servers[0].wait()
    until(lambda: state()["state"] not in ("queued", "compiling", "ready", "training"))
    assert state()["state"] == "succeeded", state()
    version = ask("GET", "/v1/adapters/alice-movies/versions/1").json()
    adapter = ask("GET", "/v1/adapters/alice-movies/versions/1/lora_B.safetensors").content
    load_adapter(adapter, version["size_d"])
    assert ask("GET", "/v1/adapters/alice-movies").json()["versions"] == 1
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT state, signed FROM programs")).all()
    assert [(row.state, json.loads(row.signed)["manifest"]["version"]) for row in rows] == [("ready", 1)]
    engine.dispose()
    metrics = ask("GET", "/metrics").text
    for line in ('mobizo_jobs{state="succeeded"} 1.0', "mobizo_devices_enrolled 2.0", "mobizo_database_up 1.0"):
        assert line in metrics
    # The doctor finds nothing wrong.
    doctor_output = topology.call("worker", SERVICES["worker"]["healthcheck"]["test"][1:])
    assert "fail" not in [line.split()[0] for line in doctor_output.splitlines()]
    # All that still run are stopped as containers are.
    running_processes = [process for process in topology._processes if process.poll() is None]
    assert len(running_processes) == 4
    for process in running_processes:
        process.terminate()
    assert [process.wait(PATIENCE) for process in running_processes] == [0, 0, 0, 0]
    balancer.shutdown()
    balancer.server_close()
    check_logs(topology, tokens, job, tmp_path)


def database_of(topology):
    variables = topology.environment("server")
    return {
        "home": variables["MOBIZO_HOME"],
        "database_url": variables["MOBIZO_DATABASE_URL"],
        "database_password": (topology.secrets / "database-password").read_text().strip(),
    }


def check_logs(topology, tokens, job, tmp_path):
    """One job can be followed through all logs, and no log holds a secret."""
    names = ("migrate", "server-0", "server-1", "worker-0", "worker-1", "agent-0", "agent-1")
    logs = {name: topology.log(name) for name in names}

    def events(*names, **fields):
        """The structured lines of some logs that have these values."""
        lines = [json.loads(line) for name in names for line in logs[name].splitlines() if line.startswith("{")]
        return [line for line in lines if fields.items() <= line.items()]

    (submission,) = events("server-0", event="job-submitted")
    assert (submission["job"], submission["recipe"]) == (job["id"], job["recipe_id"])
    (request,) = events("server-0", event="request", request_id=submission["request_id"])
    assert (request["method"], request["path"], request["status"]) == ("POST", "/v1/jobs", 202)
    compile_events = events("worker-0", "worker-1", recipe=job["recipe_id"])
    assert {"compile-started", "compiling", "compile-finished"} <= {line["event"] for line in compile_events}
    key = (Path(topology.environment("server")["MOBIZO_HOME"]) / "keys" / "manifest.ed25519").read_bytes()
    devices = [(tmp_path / f"agent-{number}" / "device.key").read_bytes() for number in range(2)]
    hidden = [
        *tokens,
        (topology.secrets / "database-password").read_text().strip(),
        (topology.secrets / "storage-secret").read_text().strip(),
        (topology.secrets / "tls-key").read_text().splitlines()[1],
        *(form for secret in (key, *devices) for form in (secret.hex(), base64.b64encode(secret).decode())),
    ]
    for name, text_ in logs.items():
        for secret in hidden:
            assert secret not in text_, f"{name} tells a secret"
