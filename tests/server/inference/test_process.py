"""The scorer's process: it ends with its server, which has no torch in its memory, and is held to time and memory."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry

from server.inference import scorer as scorer_module
from server.inference.errors import ScorerLate
from server.inference.scorer import Scorer, ScorerMeters
from shared.chat_template import ChatTemplate, InvalidConversation
from tests.server.homes import eventually
from tests.server.operations.test_serving import PATIENCE, family, running, wait_for_exit

TURNS = [{"role": "user", "content": "a"}] * 4
# Each renders the short conversation of the check at registration.
LARGE = ChatTemplate(template="{% if messages|length > 3 %}{{ ('x' * 6999999999)|length }}{% endif %}x")
ENDLESS = ChatTemplate(template="{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x")
GOOD = ChatTemplate(template="{{ messages[0].content }}")


def scorer_of(process):
    """The scorer's process, once it has loaded torch."""
    return eventually(lambda: next((child for child in family(process) if holds_torch(child.pid)), None), PATIENCE)


def holds_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_server(home, number):
    home.settings = home.settings.model_copy(update={"scorer": "eager"})
    with running(home, "--workers", "0") as (process, _):
        scorer = scorer_of(process)
        assert not holds_torch(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE) == (0 if number == signal.SIGTERM else -number)
        wait_for_exit([scorer])


def test_templates_are_held_to_time_and_memory(home):
    async def render():
        scorer = Scorer(home.settings, ScorerMeters(CollectorRegistry()))
        try:
            with pytest.raises(InvalidConversation, match="MiB of memory"):
                await scorer.render(LARGE, TURNS)
            with pytest.raises(InvalidConversation, match="within 5 seconds"):
                await scorer.render(ENDLESS, TURNS)
            pid = scorer.pid
            assert await scorer.render(GOOD, TURNS) == "a"
            assert (scorer.pid, psutil.Process(pid).memory_info().rss < 2 << 30) == (pid, True)
        finally:
            await scorer.close()

    asyncio.run(render())


def test_a_process_that_hangs_is_replaced(home, monkeypatch):
    async def render():
        scorer = Scorer(home.settings, ScorerMeters(CollectorRegistry()))
        try:
            assert await scorer.render(GOOD, TURNS) == "a"
            os.kill(pid := scorer.pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(scorer_module, "CALL_SECONDS", 0.2)
                with pytest.raises(ScorerLate):
                    await scorer.render(GOOD, TURNS)
            assert await scorer.render(GOOD, TURNS) == "a"
            assert scorer.pid != pid
        finally:
            await scorer.close()

    asyncio.run(render())
