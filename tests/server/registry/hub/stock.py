"""The stock client of the Hub, in two major versions, each in a process of its own that does what it is told.

The newer is the one that is installed here. The older, which cannot be installed beside it, is fetched once through pip
and kept in the user's cache; of what it needs all is here already.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

OLD = "0.36.2"
PROGRAM = Path(__file__).with_name("stock_client.py")


class Missing(Exception):
    """This machine cannot give the older client; says what it lacks."""


class Refused(Exception):
    """What a call raised: its class, the classes that this is one of, and its words."""

    def __init__(self, error):
        self.name, self.classes, self.text = error["name"], error["classes"], error["text"]
        super().__init__(f"{self.name}: {self.text}")


def old_client():
    """The directory of the older client. Raises Missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mobizo-tests"
    place = cache / f"huggingface_hub-{OLD}"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="aside-", dir=cache) as aside:
            packages = Path(aside) / "packages"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            process = subprocess.run(
                [*command, "--target", packages, f"huggingface_hub=={OLD}"], capture_output=True, text=True, check=False
            )
            if process.returncode != 0:
                raise Missing(f"pip cannot fetch huggingface_hub {OLD}: {process.stderr.strip()[-300:]}")
            try:
                packages.rename(place)
            except OSError:
                if not place.exists():  # else another session was faster
                    raise
    return place


class Client:
    """A running client."""

    def __init__(self, process, cache):
        self._process, self.cache = process, cache

    def __call__(self, name, /, *arguments, **options):
        """What a function of huggingface_hub (or, as `api.NAME`, a method of HfApi) gives, as JSON. Raises Refused."""
        self._process.stdin.write(json.dumps({"call": name, "arguments": arguments, "options": options}) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        if "raised" in reply:
            raise Refused(reply["raised"])
        return reply["value"]


@contextlib.contextmanager
def stock_client(version, cache, endpoint=None, token=None, **environment):
    """A client of major version 0 or 2 whose cache is `cache`; endpoint, token: as its environment says them."""
    cache.mkdir(parents=True, exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    } | environment
    variables |= {"HF_ENDPOINT": endpoint} if endpoint else {}
    variables |= {"HF_TOKEN": token} if token else {}
    if version == 0:
        variables["PYTHONPATH"] = str(old_client())
    process = subprocess.Popen(
        [sys.executable, "-W", "error", PROGRAM],
        env=variables,
        cwd=cache,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        client = Client(process, cache)
        assert client("version").startswith(f"{version}.")
        yield client
    finally:
        process.kill()
        process.communicate()
