"""Scoring and generating over HTTP, against transformers with peft on the files that devices uploaded."""

import html
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import httpx
import numpy as np
import psutil
import pytest

from server.database.columns import utc_now
from server.inference.scorer import make_scorer
from server.inference.service import ReadRow, ResolvedTarget, texts_to_score
from server.registry.models import StoredVersion
from server.registry.repository import resolve
from shared.access import Role
from shared.errors import BadRequest
from shared.recipe import BaseRef, Recipe
from shared.task_records import Choice
from shared.zo.encoding import Row
from tests.server.dashboard.people import FIELD, Person
from tests.server.homes import eventually
from tests.server.inference.conftest import FIVE

TOLERANCE = 1e-3  # nats
TEXTS = ("a film", "It was a very good film", "x", "bad bad film was very very bad x")
ANSWERS = (" great", " terrible", " very very good")


def score(actor, *rows, **changes):
    response = actor.post("/v1/score", json={"rows": list(rows)} | changes)
    assert response.status_code == 200, response.text
    return response.json()["rows"]


def generate(actor, prompt, **changes):
    response = actor.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | changes)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0] | response.json()["usage"]


def test_rows_of_many_adapters_are_scored_as_in_peft(site):
    cases = [(name, text) for text in TEXTS for name in (*FIVE, None)]
    rows = [{"adapter": name, "prompt": text, "answers": ANSWERS} for name, text in cases]
    results = score(site.fleet.app(), *rows, base="tiny")
    assert len(results) == len(cases)
    for (name, text), row in zip(cases, results, strict=True):
        expected = [site.expected("default", name, text, answer) for answer in ANSWERS]
        log_probabilities = [answer["log_probability"] for answer in row["answers"]]
        np.testing.assert_allclose(log_probabilities, expected, atol=TOLERANCE, rtol=0)
        assert row["best"] == int(np.argmax(expected))
        shares = np.exp(expected) / np.exp(expected).sum()
        np.testing.assert_allclose([answer["probability"] for answer in row["answers"]], shares, atol=TOLERANCE)
        assert [(answer["text"], answer["tokens"]) for answer in row["answers"]] == [
            *zip(ANSWERS, (1, 1, 3), strict=True)
        ]
        assert (row["base"], row["adapter"], row["version"]) == ("tiny", name, None if name is None else 1)
        assert (row["revision"] is None) == (name is None)


@pytest.mark.parametrize("loss", ["full", "candidates"])
def test_rows_are_scored_as_their_adapter_was_trained(loss):
    recipe = Recipe(base=BaseRef(name="tiny", sha256="ab" * 32), loss=loss, answer_length=2, choices=2)
    version = StoredVersion(recipe=recipe)
    rows = (Row((1, 2), (5, 6)), Row((1, 2), (7,)))
    row = ReadRow(ResolvedTarget(None, "a", version), (Choice("x", "a"), Choice("x", "b")), (None, None), rows)
    assert row.plan.restricted == (loss == "candidates")
    assert [text.tokens for text in texts_to_score(row)] == [(1, 2) if row.plan.restricted else (1, 2, 5)]
    row.check("rows.0")
    same = ReadRow(
        row.target, (Choice("x", " bug"), Choice("x", " bug report")), (), (Row((1,), (5,)), Row((1,), (5, 6)))
    )
    refused = pytest.raises(BadRequest, match=r"rows\.0: the answer ' bug' is the beginning of ' bug report'")
    with refused if loss == "candidates" else nullcontext():
        same.check("rows.0")
    others = (Row((1, 2), (5,)), Row((1, 3), (5,)))  # of two prompts, which do not compete token by token
    assert not ReadRow(row.target, (), (None, None), others).plan.restricted
    assert not ReadRow(ResolvedTarget(None, None, None), (), (None, None), rows).plan.restricted


def test_records_are_scored_by_a_task(site):
    (row,) = score(site.fleet.app(), {"adapter": "red", "record": {"text": "a very good film"}}, task="sst2")
    assert [(answer["text"], answer["label"]) for answer in row["answers"]] == [
        (" terrible", "negative"),
        (" great", "positive"),
    ]
    expected = [site.expected("default", "red", "a very good film It was", text) for text in (" terrible", " great")]
    np.testing.assert_allclose([answer["log_probability"] for answer in row["answers"]], expected, atol=TOLERANCE)


def test_tenants_are_apart(site):
    """Two tenants' adapters of one name, asked for at the same time: each gets its own, and none the other's."""

    def ask(tenant):
        row = {"adapter": "red", "prompt": "It was a film", "answers": [" great"]}
        return score(site.fleet.app(tenant), *[row] * 8)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, ["default", "other"] * 6))
    for tenant, rows in zip(["default", "other"] * 6, results, strict=True):
        expected = site.expected(tenant, "red", "It was a film", " great")
        log_probabilities = [row["answers"][0]["log_probability"] for row in rows]
        np.testing.assert_allclose(log_probabilities, [expected] * 8, atol=TOLERANCE)
    assert abs(results[0][0]["answers"][0]["log_probability"] - results[1][0]["answers"][0]["log_probability"]) > 0.1


def test_a_foreign_adapter_is_as_absent_as_none(site, problem):
    documents = []
    for name in ("secret", "nobody"):
        for path, body in (
            ("/v1/score", {"rows": [{"adapter": name, "prompt": "a", "answers": ["x"]}]}),
            ("/v1/completions", {"model": name, "prompt": "a"}),
        ):
            response = site.fleet.app().post(path, json=body)
            assert response.status_code == 404
            documents.append(response.text.replace(name, "NAME"))
    assert documents[:2] == documents[2:]
    # The adapter is there, for its own tenant.
    score(site.fleet.app("other"), {"adapter": "secret", "prompt": "a", "answers": ["x"]})


def test_held_versions_wait_and_deleted_ones_are_gone(site, problem):
    app = site.fleet.app()
    site.publish("default", "worse", 40, zero_shot_accuracy=0.9, tuned_accuracy=0.2)
    row = {"prompt": "a", "answers": ["x"]}
    problem(app.post("/v1/score", json={"rows": [{"adapter": "worse@1", **row}]}), 409, "version-held")
    held = app.post("/v1/completions", json={"model": "worse@1", "prompt": "a"})
    assert (held.status_code, held.json()["error"]["code"]) == (409, "version-held")
    problem(app.post("/v1/score", json={"rows": [{"adapter": "worse", **row}]}), 404, "revision-not-found")
    with Person(site.fleet.url) as person:  # those who decide about it try it on its page
        assert person.sign_in(site.fleet.home.token(Role.APP)).status_code == 303
        at = "/ui/adapters/worse/versions/1"
        page = person.get(at)
        assert person.send_form(f"{at}/try", page, prompt="a", max_tokens="2").status_code == 200
        answer = person.send_form(f"{at}/choose", page, **{"field-text": "a very good film"})
        assert "This version answers" in answer.text
    site.publish("default", "gone", 41)
    score(app, {"adapter": "gone", **row})
    with site.fleet.home.database.writing() as session:
        resolve(session, "default", "gone", "v1")[1].deleted_at = utc_now()
    # What the scorer holds of it in memory is not to be had either.
    for name in ("gone", "gone@v1"):
        problem(app.post("/v1/score", json={"rows": [{"adapter": name, **row}]}), 404, "revision-not-found")


def test_revisions_are_versions(site, problem):
    app = site.fleet.app()
    row = {"prompt": "a good film", "answers": [" x"]}
    before = site.expected("default", "new", "a good film", " x")
    site.publish("default", "new", 30)
    after = site.expected("default", "new", "a good film", " x")
    results = score(app, *({"adapter": name, **row} for name in ("new", "new@v1", "new@2")))
    main, one, two, digits = results = results + score(app, {"adapter": f"new@{results[1]['revision'][:12]}", **row})
    assert [each["version"] for each in results] == [2, 1, 2, 1]
    assert (main["revision"], digits["revision"]) == (two["revision"], one["revision"])
    log_probabilities = [each["answers"][0]["log_probability"] for each in results]
    np.testing.assert_allclose(log_probabilities, [after, before, after, before], atol=TOLERANCE)
    problem(app.post("/v1/score", json={"rows": [{"adapter": "new@v9", **row}]}), 404, "revision-not-found")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"base": "tiny", "base_sha256": "0" * 64, "rows": [{"prompt": "a", "answers": ["x"]}]}, 422, "base-mismatch"),
        ({"base": "nothing", "rows": [{"prompt": "a", "answers": ["x"]}]}, 404, "unknown-base"),
        ({"rows": []}, 422, "invalid-request"),
        ({"rows": [{"prompt": "a", "answers": ["x"]}]}, 400, "bad-request"),  # of which base?
        ({"base": "tiny", "rows": [{"prompt": "a"}]}, 422, "invalid-request"),
        ({"base": "tiny", "rows": [{"prompt": "a", "answers": ["x"], "record": {}}]}, 422, "invalid-request"),
        ({"base": "tiny", "rows": [{"record": {"text": "a"}}]}, 422, "invalid-request"),
        ({"base": "tiny", "task": "sst2", "rows": [{"record": {"words": "a"}}]}, 422, "invalid-dataset"),
        ({"base": "tiny", "task": "none", "rows": [{"record": {"text": "a"}}]}, 422, "invalid-task"),
        ({"base": "tiny", "rows": [{"prompt": "a " * 65, "answers": ["x"]}]}, 422, "text-too-long"),
        ({"base": "tiny", "rows": [{"prompt": " ", "answers": ["x"]}]}, 400, "bad-request"),
        ({"base": "tiny", "rows": [{"adapter": "../red", "prompt": "a", "answers": ["x"]}]}, 422, "invalid-request"),
    ],
)
def test_what_cannot_be_scored_is_refused(site, problem, body, status, code):
    problem(site.fleet.app().post("/v1/score", json=body), status, code)


def test_the_context_ends_a_text(site):
    text = generate(site.fleet.app(), "a " * 60, model="tiny", max_tokens=50)
    # The last of the 65 is never read.
    assert (text["completion_tokens"], text["finish_reason"]) == (5, "length")
    response = site.fleet.app().post("/v1/completions", json={"prompt": "a " * 65, "model": "tiny"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "text-too-long")


def test_who_goes_away_is_not_worked_for(site):
    app = site.fleet.app()
    body = {"prompt": "a", "model": "red", "max_tokens": 60, "stream": True}
    with app.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
    eventually(lambda: site.app.state.mobizo.get(make_scorer).waiting == 0)
    rows = [{"adapter": "red", "prompt": "a " * 60, "answers": ["x"]}] * 1000
    with pytest.raises(httpx.TimeoutException):
        app.post("/v1/score", json={"rows": rows}, timeout=httpx.Timeout(5, read=0.05))
    eventually(lambda: site.app.state.mobizo.get(make_scorer).waiting == 0)


def test_a_scorer_that_was_killed_is_started_again(site, problem):
    app, scorer = site.fleet.app(), site.app.state.mobizo.get(make_scorer)
    row = {"adapter": "red", "prompt": "It was a film", "answers": [" great"]}
    expected = score(app, row)
    os.kill(pid := scorer.pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid))
    assert score(app, row) == expected
    # One that dies while it works: who waits is told, and the next request finds another.
    with ThreadPoolExecutor(1) as pool:
        os.kill(scorer.pid, signal.SIGSTOP)
        waiting = pool.submit(app.post, "/v1/score", json={"rows": [row]})
        eventually(lambda: scorer.waiting > 0)
        os.kill(scorer.pid, signal.SIGKILL)
        response = waiting.result()
    problem(response, 503, "scorer-stopped")
    assert response.headers["retry-after"]
    assert score(app, row) == expected
    assert site.app.state.mobizo.meters.registry.get_sample_value("mobizo_scorer_starts_total") >= 3


def test_a_version_is_tried_out_on_its_page_with_and_without_a_script(site):
    whole = generate(site.fleet.app(), prompt="a film", model="two@v1", max_tokens=12)
    with Person(site.fleet.url) as person:
        assert person.sign_in(site.fleet.home.token(Role.APP)).status_code == 303
        at = "/ui/adapters/two/versions/1"
        page = person.get(at)
        fields = {"prompt": "a film", "max_tokens": "12"}
        answer = person.send_form(f"{at}/try", page, **fields)
        assert html.escape(whole["text"]) in answer.text.split("<output")[1]
        (token, *_) = FIELD.findall(page.text)
        script = {"Accept": "text/event-stream"}
        with person.stream("POST", f"{at}/try", data=fields | {"csrf": token}, headers=script) as response:
            *pieces, usage, done = (
                event.removeprefix("data: ") for event in response.read().decode().split("\n\n")[:-1]
            )
        choices = [json.loads(piece)["choices"][0] for piece in pieces]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"]
        assert json.loads(usage)["usage"]["completion_tokens"] == whole["completion_tokens"]
        assert done == "[DONE]"
