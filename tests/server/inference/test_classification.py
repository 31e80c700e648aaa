"""`POST /v1/adapters/{name}/classify`, against transformers with peft; and the example of the model card."""

import contextlib
import io
import re

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mobizo import Client
from shared.access import Role, Scope

TOLERANCE = 1e-3  # nats
ANSWERS = {"negative": " terrible", "positive": " great"}  # of the task sst2
TEXT = "It was a very good film"


def test_the_adapter_s_own_task_makes_the_prompt(site):
    app = site.fleet.app()
    response = app.post("/v1/adapters/red/classify", json={"fields": {"text": TEXT, "label": "ignored"}})
    assert response.status_code == 200, response.text
    result = response.json()
    expected = {label: site.expected("default", "red", f"{TEXT} It was", answer) for label, answer in ANSWERS.items()}
    scores = {each["label"]: each for each in result["labels"]}
    assert set(scores) == set(expected)
    shares = np.exp(list(expected.values())) / np.exp(list(expected.values())).sum()
    for (label, log_probability), share in zip(expected.items(), shares, strict=True):
        assert scores[label]["log_probability"] == pytest.approx(log_probability, abs=TOLERANCE)
        assert scores[label]["probability"] == pytest.approx(share, abs=TOLERANCE)
    assert result["label"] == result["labels"][0]["label"] == max(expected, key=expected.get)
    assert (result["base"], result["adapter"], result["version"]) == ("tiny", "red", 1)
    with Client(site.fleet.url, app.token) as client:
        assert client.scoring.classify("red@v1", {"text": TEXT}).model_dump(mode="json") == result


def test_what_is_wrong_is_one_error(site, problem):
    app = site.fleet.app()

    def refused(fields, status, code, name="red", actor=app):
        return problem(actor.post(f"/v1/adapters/{name}/classify", json={"fields": fields}), status, code)

    missing = refused({"sentence": TEXT}, 422, "invalid-request")
    assert missing["detail"] == "fields: text missing; the adapter's task 'sst2' needs text"
    assert missing["errors"] == [{"field": "fields.text", "message": "missing"}]
    wrong = refused({"text": ["a"]}, 422, "invalid-dataset")
    assert wrong["detail"] == "fields: field 'text' is a list; it must be a text"
    refused({"text": "film " * 200}, 422, "text-too-long")
    for name in ("secret", "red@v9", "x" * 200):  # `secret` is another tenant's
        assert app.post(f"/v1/adapters/{name}/classify", json={"fields": {"text": "x"}}).status_code == 404
    reader = site.fleet.actor(site.fleet.home.token(Role.APP, scopes=[Scope.ADAPTERS_READ]))
    refused({"text": TEXT}, 403, "forbidden", actor=reader)


def test_the_example_of_the_card_chooses_the_same_label(site, monkeypatch):
    app = site.fleet.app()
    card = app.get("/v1/adapters/red/versions/1/peft/README.md").text
    assert '"prompt": "{text} It was"' in card
    example = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1].replace("<text>", TEXT)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(site.source / "tokenizer.json"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda directory: tokenizer)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {"model": site.stock["default", "red"]})
    result = app.post("/v1/adapters/red/classify", json={"fields": {"text": TEXT}}).json()
    assert printed.getvalue().strip() == result["label"]
