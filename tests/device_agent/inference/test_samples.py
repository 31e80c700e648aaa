"""What an adapter writes for held-out records, beside the base and the record's own text."""

import json

import pytest

from device_agent.inference.personal_model import open_personal
from device_agent.inference.samples import write_samples
from shared.errors import BadRequest
from shared.task import Task
from tests.device_agent.use import keep_adapter

SEQUEL = Task(name="sequel", kind="completion", prompt="{text}", answer=" It was")
WHOLE = Task(name="whole", kind="text")


@pytest.mark.parametrize("task", [SEQUEL, WHOLE], ids=["completion", "text"])
def test_samples_are_held_out_and_what_the_models_write(home, rademacher, server_key, dataset, task):
    keep_adapter(home, rademacher, server_key, task=task)
    samples = write_samples(home, "alice-movies", dataset, 4, 5)
    records = [json.loads(line) for line in (dataset / "test.jsonl").read_text().splitlines()]
    split, texts = samples
    assert (split, len(texts)) == ("test", 4)
    assert write_samples(home, "alice-movies", dataset, 4, 5) == samples
    models = {name: open_personal(home, "alice-movies", base=name == "base") for name in ("base", "adapter")}
    for each in texts:
        if task is SEQUEL:
            assert each.prompt in [record["text"] for record in records]
            assert each.own == " It was"
        else:
            assert any(record["text"].startswith(each.prompt + each.own) for record in records)
        for name, model in models.items():
            prompt = model.tokenizer.encode(each.prompt).ids
            text = model.tokenizer.decode([each.token for each in model.inference.generate(prompt, 5)])
            assert getattr(each, name) == text
    for model in models.values():
        model.close()
    assert any(each.base != each.adapter for each in texts)


def test_a_task_that_chooses_has_no_samples(home, rademacher, server_key, dataset):
    keep_adapter(home, rademacher, server_key)
    with pytest.raises(BadRequest, match="mobizo-agent predict"):
        write_samples(home, "alice-movies", dataset, 1, 1)
