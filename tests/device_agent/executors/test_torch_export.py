"""Programs for PyTorch: the run that ExecuTorch makes, on any device, from files that are never trusted.

No GPU is needed: what a device other than the CPU asks of the code is tested on torch's `meta` device.
"""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from device_agent.errors import RuntimeFailed
from device_agent.executors.program import TrainingProgram
from device_agent.executors.python import open_program
from device_agent.executors.torch_export import TorchExecutor
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_score, pack_step
from tests.device_agent.warm_starts import random_b

LR, EPS = 0.05, 0.01
SETTINGS = {
    "rademacher": {},
    "stored": {"estimator": "stored", "loss": "candidates", "layers": "last:1"},
}


@pytest.fixture(scope="module")
def compiled(compile_tiny):
    """The program for torch of one of SETTINGS."""
    return lambda name: compile_tiny(f"torch-{name}", backend="torch", **SETTINGS[name])


@pytest.fixture(params=["rademacher", pytest.param("stored", marks=pytest.mark.slow)])
def twins(request, compiled):
    """One recipe's programs for XNNPACK and for torch."""
    return request.getfixturevalue(request.param), compiled(request.param)


@pytest.fixture
def plain(compiled):
    return compiled("rademacher")


def test_a_run_is_the_one_that_executorch_makes(twins, dataset):
    """Scores and steps of every length, then what B has become, on the device that open_program chooses."""
    ours, theirs = twins
    runtimes = [open_program(program.manifest, *program.files) for program in twins]
    examples, recipe = ours.examples(dataset), ours.manifest.recipe
    assert theirs.manifest.dynamic_length
    for batch in pack_score(examples, recipe):
        scores = [runtime.score(batch.inputs) for runtime in runtimes]
        np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)
    lengths = set()
    for step in range(5):
        batch_examples = examples[step : step + recipe.effective_batch]
        batch = pack_step(batch_examples, recipe, dynamic=step > 0)
        lengths.add(batch[0].shape[1])
        (losses, coefficients), (other_losses, other_coefficients) = (
            runtime.step(batch, query_seeds(5, step, recipe.queries), LR, EPS) for runtime in runtimes
        )
        # One step differs by rounding alone; the next ones start from what that has made of B.
        np.testing.assert_allclose(other_losses, losses, rtol=5e-5 if step else 2e-6)
        np.testing.assert_allclose(other_coefficients, coefficients, atol=2e-5)
    assert len(lengths) > 1
    np.testing.assert_allclose(runtimes[1].adapter(), runtimes[0].adapter(), atol=1e-4)
    assert np.abs(runtimes[0].adapter()).max() > 0.01
    for runtime in runtimes:
        runtime.load(random_b(ours.manifest))
        runtime.replay(query_seeds(5, 0, recipe.queries), np.full(recipe.queries, 0.1, np.float32), EPS)
    if (recipe.noise, recipe.estimator) == ("rademacher", "replay"):
        np.testing.assert_array_equal(runtimes[1].adapter(), runtimes[0].adapter())
    else:
        # Each library has its own logarithm, and rounds in its own way what `stored` divides by eps.
        np.testing.assert_allclose(runtimes[1].adapter(), runtimes[0].adapter(), atol=1e-6)


# A NumPy array taken up, and a copy from one device to another.
ENTRANCES = (torch.ops.aten.lift_fresh.default, torch.ops.aten.to.dtype_layout, torch.ops.aten._to_copy.default)


class Devices(TorchDispatchMode):
    """Notes on which devices the tensors of every operator are, but for ENTRANCES."""

    def __init__(self):
        super().__init__()
        self.device_types, self.operators = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function not in ENTRANCES:
            self.operators += 1
            self.device_types |= {
                item.device.type for item in tree_flatten((args, kwargs, output))[0] if torch.is_tensor(item)
            }
        return output


def test_everything_is_on_the_device(twins, dataset):
    """Weights, constants, B, inputs and what graphs make; only the result leaves it, and `meta` has none to give."""
    _, program = twins
    executor = TorchExecutor(*program.files, device=torch.device("meta"))
    runtime, recipe = TrainingProgram(program.manifest, executor), program.manifest.recipe
    batch = pack_step(program.examples(dataset)[:4], recipe, dynamic=True)
    scores = next(iter(pack_score(program.examples(dataset), recipe))).inputs
    seeds = query_seeds(0, 0, recipe.queries)
    calls = {
        "step": lambda: runtime.step(batch, seeds, LR, EPS),
        "score": lambda: runtime.score(scores),
        "replay": lambda: runtime.replay(seeds, np.zeros(recipe.queries, np.float32), EPS),
        "load": lambda: runtime.load(random_b(program.manifest)),
    }
    for name, call in calls.items():
        with Devices() as devices, pytest.raises(RuntimeFailed, match=f"'{name}'.*copy out of meta"):
            call()
        assert devices.device_types == {"meta"}
        assert devices.operators > {"step": 100, "score": 100, "replay": 20, "load": 1}[name]


def rewritten(source, target, changes):
    """A copy of an archive. changes: by a record's ending, what its bytes become."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            change = next((changes[ending] for ending in changes if name.endswith(ending)), None)
            new.writestr(name, old.read(name) if change is None else change(old.read(name)))
    return target


def first_node(**values):
    """Puts values into the first node of a graph."""

    def change(data):
        model = json.loads(data)
        model["graph_module"]["graph"]["nodes"][0] |= values
        return json.dumps(model).encode()

    return change


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"target": "torch.os.system"}, "not an ATen operator"),
        ({"target": "torch.ops.aten.__class__.mro"}, "not an ATen operator"),
        (
            {"target": "torch.ops.aten.from_file.default", "inputs": [{"arg": {"as_string": "x"}, "kind": 1}]},
            "as_string",
        ),
        ({"outputs": [{"as_custom_obj": {"name": "x"}}]}, "as_custom_obj"),
    ],
)
def test_a_graph_may_name_arithmetic_only(plain, tmp_path, node, message):
    bad = rewritten(plain.path("program"), tmp_path / "bad.pt2", {"models/load.json": first_node(**node)})
    with pytest.raises(RuntimeFailed, match=f"does not load.*{message}"):
        open_program(plain.manifest, bad, plain.path("weights"))


class Planted:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled(plain, tmp_path):
    """Where torch's own reader is caught, as it shows here, this one has nothing to unpickle with."""
    from torch.export.pt2_archive._package import load_pt2

    trap = tmp_path / "trap"
    planted = pickle.dumps(Planted(trap), protocol=2)
    bad = rewritten(plain.path("program"), tmp_path / "bad.pt2", {"sample_inputs/load.pt": lambda _: planted})
    assert open_program(plain.manifest, bad, plain.path("weights")).adapter().size == plain.manifest.size
    assert not trap.exists()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it says, it has made the directory
        load_pt2(str(bad))
    assert trap.exists()


@pytest.mark.parametrize("bad", ["half an archive", "other weights", "no weights"])
def test_files_that_are_no_program_are_named(plain, tmp_path, bad):
    program, weights, broken = *plain.files, tmp_path / "broken"
    if bad == "half an archive":
        broken.write_bytes(program.read_bytes()[: program.stat().st_size // 2])
        program = broken
    elif bad == "other weights":
        tensors = load_file(weights)
        tensors["backbone.norms"] = tensors["backbone.norms"][:-1].clone()
        save_file(tensors, broken)
    with pytest.raises(RuntimeFailed, match="does not load"):
        open_program(plain.manifest, program, weights if program == broken else broken)
