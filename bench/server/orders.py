"""The orders of `bench.server.load`, and starting it."""

import subprocess
import sys
from typing import Any

from pydantic import BaseModel

from bench.server.home import DATASET, RECIPE, RESULT, Credentials, job

STEPS = 2  # heartbeats of a lease


class Orders(BaseModel):
    """What the load does. jobs: their number, or None until `enough`; rate: jobs per second; vanish: share of leases
    that a device abandons; jobs_per_recipe: one program for so many jobs."""

    url: str
    app: str
    devices: list[Credentials]
    jobs: int | None = None
    rate: float = 5.0
    wait_seconds: float = 0.0
    beat_seconds: float = 0.05
    ramp_seconds: float = 0.0
    vanish: float = 0.0
    retry: bool = False
    jobs_per_recipe: int | None = None
    dataset: str = DATASET
    capabilities: dict[str, Any] = {
        "backends": ["xnnpack", "portable"],
        "engines": ["native"],
        "executorch": "1.5.1",
    }
    result: dict[str, Any] = RESULT.model_dump(mode="json")

    def job(self, number: int) -> dict[str, Any]:
        """Returns the body of one job."""
        if self.jobs_per_recipe is None:
            return job(number)
        recipe = RECIPE | {"a_seed": number // self.jobs_per_recipe}
        return job(number, recipe, priority=number % 3)


def start_load(orders: Orders) -> "subprocess.Popen[str]":
    """Starts the load in a process of its own and waits until it is ready."""
    command = [sys.executable, "-m", "bench.server.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(orders.model_dump_json() + "\n")
    process.stdin.flush()
    if process.stdout.readline() != "ready\n":
        raise SystemExit("the load did not start")
    return process
