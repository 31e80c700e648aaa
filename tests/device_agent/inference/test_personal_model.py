"""An adapter that changes under a model in use: B is loaded into the running program, and nothing is started again."""

from contextlib import closing

import psutil
import pytest

from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.personal_model import LiveModel, open_personal
from device_agent.inference.predict import predict
from shared.signing import sign_manifest
from shared.zo.lora import dump_adapter
from tests.device_agent.conftest import TASK
from tests.device_agent.use import Session, keep_adapter
from tests.device_agent.warm_starts import random_b

NAME = "alice-movies"
RECORD = {"text": "a warm plot"}


@pytest.fixture(params=["runner_directory", "without_runner"])
def executor(request):
    """What runs the inference program: the native runner, or ExecuTorch's Python runtime where none is installed."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def keep(home, rademacher, server_key):
    """Keeps another adapter, as a job that completes or a pull does."""
    keep_adapter(home, rademacher, server_key)

    def keep(seed, program=rademacher):
        flat = random_b(program.manifest, seed)
        signed = sign_manifest(program.manifest, server_key)
        AdapterStore(home).add(NAME, dump_adapter(flat, {}), signed, TASK, f"job-{seed}")

    return keep


@pytest.fixture
def live(home, keep):
    model = LiveModel(home, NAME)
    yield model
    model.close()


@pytest.fixture
def last(compile_tiny):
    """A program of another recipe, with its file for inference."""
    return compile_tiny("last", inference=True, layers="last:1")


def answers(model):
    return [candidate.log_probability for candidate in predict(model, RECORD, "here").candidates]


def fresh(home):
    """What a model that is opened only now says."""
    with closing(open_personal(home, NAME)) as model:
        return answers(model)


def children():
    return {child.pid for child in psutil.Process().children()}


def test_the_next_question_is_answered_by_the_newest(executor, home, keep, live):
    before, processes, inference = answers(live.model), children(), live.model.inference
    assert before == fresh(home)
    assert live.refresh() is None
    keep(2)
    assert answers(live.model) == before  # not in the middle of anything
    assert "of job job-2" in live.refresh()
    assert answers(live.model) == fresh(home) != before
    assert live.model.inference is inference
    assert children() == processes
    assert live.refresh() is None


@pytest.mark.slow
def test_an_adapter_of_another_program_is_opened_anew(home, keep, live, last):
    for role in ("weights", "tokenizer", "inference"):
        file = last.manifest.file(role)
        (home.cache / file.sha256).write_bytes(last.path(role).read_bytes())
    keep(3, last)
    assert "of job job-3" in live.refresh()
    assert live.model.manifest == last.manifest
    assert answers(live.model) == fresh(home)


@pytest.mark.slow
def test_a_new_version_that_cannot_be_used_leaves_the_one_before_in_use(home, keep, live, last):
    before = answers(live.model)
    keep(3, last)  # whose inference file is not here
    message = live.refresh()
    assert "adapter pull" in message
    assert "stays in use" in message
    assert answers(live.model) == before
    assert live.refresh() is None  # said once
    keep(2)
    newest = AdapterStore(home).newest(NAME)
    (home.path / "adapters" / NAME / newest / "adapter.safetensors").write_bytes(b"damaged")
    assert "damaged" in live.refresh()
    assert answers(live.model) == before


def test_the_base_alone_and_a_forgotten_adapter_stay_as_they_are(home, keep, live):
    base = LiveModel(home, NAME, base=True)
    keep(2)
    zero = answers(base.model)
    assert base.refresh() is None
    assert answers(base.model) == zero
    base.close()
    AdapterStore(home).remove(NAME)
    assert live.refresh() is None


@pytest.mark.parametrize("arguments", [["predict", NAME], ["chat", NAME, "--max-tokens", "8"]])
def test_a_running_session_takes_it_without_a_restart(home, keep, arguments):
    with Session(home, *arguments) as session:
        first = session.ask("it was")
        keep(2)
        second = session.ask("it was")
        AdapterStore(home).rollback(NAME)
        assert session.ask("it was") == first != second
        messages = session.end()
    assert "now the adapter of job job-2" in messages
    assert "now the adapter of job job-1" in messages
