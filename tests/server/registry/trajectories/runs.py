"""Runs that no device made: ledgers of random coefficients, and the B that the plain replay makes of them."""

import numpy as np

from shared.canonical import sha256_hex
from shared.zo.lora import adapter_file, load_adapter
from shared.zo.trajectory import Evaluation, TrajectoryFile, TrajectoryHeader
from tests.server.actors import result

STEPS, BEST = 40, 25
TRAINING = {"steps": STEPS, "seed": 77, "evaluation_interval": 5}


class Run:
    """What a device has after a run: its ledger and its best B."""

    def __init__(self, lease, directory, steps=STEPS, best=BEST, start=None, factor=None, **header):
        """start: the adapter file that it goes on from. factor: of the pull after each step, in a run with pulls."""
        manifest = lease["manifest"]["manifest"]
        self.size, self.steps, self.best, self.manifest = manifest["size"], steps, best, manifest
        self.job_id = lease["job"]["id"]
        self.start = np.zeros(self.size, np.float32) if start is None else load_adapter(start, self.size)
        fields = {
            "job_id": self.job_id,
            "job_seed": 77,
            "recipe_id": manifest["recipe_id"],
            "noise": manifest["recipe"]["noise"],
            "queries": manifest["recipe"]["queries"],
            "size": self.size,
            "start_sha256": None if start is None else sha256_hex(start),
        } | header
        path = directory / f"{self.job_id}.bin"
        path.unlink(missing_ok=True)
        file = TrajectoryFile(path, TrajectoryHeader(**fields))
        rng = np.random.default_rng(5)
        for step in range(steps):
            file.append_step(rng.normal(size=fields["queries"]).astype(np.float32), factor)
            if step % 5 == 0:
                file.append_evaluation(Evaluation(step=step, split="validation", correct=1, total=2, loss=0.5))
        file.close()
        self.trajectory, self.ledger = file.trajectory, path.read_bytes()

    def b(self, step=None):
        """Flat B by the plain replay."""
        return self.trajectory.replay(self.start, self.best if step is None else step)

    def adapter(self, step=None):
        at = self.best if step is None else step
        manifest = self.manifest
        return adapter_file(
            self.b(at), job_id=self.job_id, recipe_id=manifest["recipe_id"], a_sha256=manifest["a_sha256"], step=at
        )

    def result(self, **changes):
        return result(steps=self.steps, best_step=self.best, **changes)


def send(device, lease, ledger):
    return device.put(f"/v1/leases/{lease['id']}/trajectory", content=ledger)


def complete(device, lease, adapter, ledger, result):
    body = {"adapter_sha256": sha256_hex(adapter), "trajectory_sha256": ledger and sha256_hex(ledger), "result": result}
    return device.post(f"/v1/leases/{lease['id']}/complete", json=body)


def finish(device, lease, run):
    send(device, lease, run.ledger).raise_for_status()
    response = complete(device, lease, run.adapter(), run.ledger, run.result())
    assert response.status_code == 200, response.text
    return response.json()
