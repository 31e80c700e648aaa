"""`mobizo-agent serve`, asked by the unmodified `openai` client, against the library's own generation."""

import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from device_agent.datasets.store import DatasetStore
from device_agent.home import HOME_VARIABLE, AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.inference.personal_model import open_personal
from device_agent.inference.predict import predict
from shared.chat_template import ChatTemplate
from shared.signing import new_private_key
from tests.device_agent.commands import start_agent
from tests.device_agent.native import ROOT
from tests.device_agent.use import keep_adapter
from tests.other_clients import answers_of, other_clients, plain_answers

TURNS = [{"role": "system", "content": "warm"}, {"role": "user", "content": "dull plot"}]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% if not loop.last %} {% endif %}"
)
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}\n{{ ' a:' }}{% endif %}"
TOKENS = {"bos_token": "!"}
END = 287  # a row of the embedding table that the tokenizer has no token for
SCHEMA = {
    "type": "object",
    "properties": {"is": {"enum": ["warm", 7]}},
    "required": ["is"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory, rademacher):
    """A running `serve` in a home with two adapters, whose program has a chat template; and the library's models."""
    home, key = AgentHome(tmp_path_factory.mktemp("serving") / "home"), new_private_key()
    home.create()
    template = ChatTemplate(template=TEMPLATE, tokens=TOKENS)
    program = replace(rademacher, manifest=rademacher.manifest.model_copy(update={"chat_template": template}))
    hermes = ChatTemplate(
        template="{# <tool_call>{ #}{% if tools %}{{ tools | length }}{% endif %}" + TEMPLATE, tokens=TOKENS
    )
    changes = {"end_of_text": END, "chat_template": hermes}
    ending = replace(program, manifest=program.manifest.model_copy(update=changes))
    keep_adapter(home, ending, key, "json", seed=1)
    for seed, name in ((1, "red"), (3, "blue"), (2, "blue")):
        keep_adapter(home, program, key, name, seed=seed)
    with ExitStack() as stack:
        details = stack.enter_context(serving(home, "--queue", "3", "--feedback", "ratings"))
        models = {name: open_personal(home, name) for name in ("red", "blue")}
        models["tiny"] = open_personal(home, "red", base=True)
        for model in models.values():
            stack.callback(model.close)
        yield SimpleNamespace(home=home, url=details["url"], token=details["token"], models=models)


@contextmanager
def serving(home, *options):
    """Runs `serve`; yields what it says at first."""
    with start_agent(home, "serve", "--port", "0", "--json", *options, stdout=-1, text=True) as process:
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(site):
    with openai.OpenAI(base_url=site.url, api_key=site.token, max_retries=0) as client:
        yield client


def generated(site, name, prompt, count):
    model = site.models[name]
    before = model.tokenizer.encode(prompt).ids
    tokens = [each.token for each in model.inference.generate(before, count)]
    return model.tokenizer.decode(before + tokens)[len(model.tokenizer.decode(before)) :]


def address(site):
    host, _, port = site.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    return host, int(port)


def status_line(site, data):
    """Returns the first line that the server answers to these bytes."""
    with socket.create_connection(address(site), timeout=30) as connection, connection.makefile("rb") as answer:
        connection.sendall(data)
        return answer.readline()


def test_the_token_is_made_once_for_its_owner_alone(site):
    path = site.home.path / "serve.token"
    assert path.read_text().strip() == site.token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with serving(site.home) as details:
        assert "token" not in details


def test_models_are_the_adapters_and_their_base(client):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {"red", "blue", "json", "tiny"}
    assert (models["red"].owned_by, models["red"].parent) == ("device", "tiny")
    assert client.models.retrieve("tiny").owned_by == "base"


def test_each_request_gets_its_own_adapter(site, client):
    texts = {}
    for name in ("red", "blue", "tiny", "red"):
        completion = client.completions.create(model=name, prompt=["It was", "a film"], max_tokens=6, temperature=0)
        expected = [generated(site, name, prompt, 6) for prompt in ("It was", "a film")]
        assert [choice.text for choice in completion.choices] == expected
        assert [choice.finish_reason for choice in completion.choices] == ["length", "length"]
        assert completion.usage.completion_tokens == 12
        texts[name] = expected[0]
    assert len(set(texts.values())) == 3


def test_a_version_that_becomes_the_newest_answers_the_next_request(site, client):
    store, texts = AdapterStore(site.home), []
    for _ in range(3):
        completion = client.completions.create(model="blue", prompt="It was", max_tokens=6, temperature=0)
        texts.append(completion.choices[0].text)
        store.rollback("blue")
    store.rollback("blue")
    assert texts[0] == texts[2] != texts[1]


def test_a_chat_is_written_as_transformers_writes_it(site, client):
    model = site.models["red"]
    path = site.home.cache / model.manifest.file("tokenizer").sha256
    stock = PreTrainedTokenizerFast(tokenizer_file=str(path), **TOKENS)
    stock.chat_template = TEMPLATE
    before = stock.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = stock.decode([each.token for each in model.inference.generate(before, 8)])
    request = {"model": "red", "messages": TURNS, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(before)
    *pieces, end, usage = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content for piece in pieces) == expected
    assert (end.choices[0].finish_reason, usage.usage) == ("length", whole.usage)


@other_clients
def test_other_libraries_hold_a_conversation(site, client, name):
    assert answers_of(name, site.url, site.token, "red", "warm") == plain_answers(client, "red", "warm")


def test_log_probabilities_stops_and_seeds(site, client):
    request = {"model": "blue", "prompt": "a film", "max_tokens": 8}
    plain = client.completions.create(**request, temperature=0, logprobs=2).choices[0]
    model = site.models["blue"]
    before = model.tokenizer.encode("a film").ids
    tokens = [each.token for each in model.inference.generate(before, 8)]
    scores = [model.inference.score(before + tokens[:at], [[token]])[0] for at, token in enumerate(tokens)]
    np.testing.assert_allclose(plain.logprobs.token_logprobs, scores, atol=1e-3)
    assert max(plain.logprobs.top_logprobs[0].values()) == plain.logprobs.token_logprobs[0]
    stop = plain.text[3:5]
    stopped_choice = client.completions.create(**request, temperature=0, stop=stop).choices[0]
    assert (stopped_choice.text, stopped_choice.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    texts = [[choice.text for choice in client.completions.create(**request, n=3, seed=5).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_a_record_is_classified_as_predict_does(site, client):
    def ask(name, fields):
        return client.post(f"/adapters/{name}/classify", body={"fields": fields}, cast_to=dict)

    result = ask("red", {"text": "a film"})
    prediction = predict(site.models["red"], {"text": "a film"}, "here")
    expected = {each.label: (each.probability, each.log_probability) for each in prediction.candidates}
    assert {each["label"]: (each["probability"], each["log_probability"]) for each in result["labels"]} == expected
    best = max(prediction.candidates, key=lambda candidate: candidate.log_probability)
    assert result["label"] == result["labels"][0]["label"] == best.label
    assert (result["base"], result["adapter"], result["version"]) == ("tiny", "red", None)
    assert ask("blue", {"text": "a film"})["labels"] != result["labels"]
    with pytest.raises(openai.UnprocessableEntityError, match="fields: text missing; the adapter's task 'sst2' needs"):
        ask("red", {"sentence": "a film"})
    with pytest.raises(openai.NotFoundError):
        ask("nobody", {"text": "a film"})


@pytest.mark.parametrize(
    ("changes", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        ({"model": "red@v9"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.UnprocessableEntityError, "invalid-request", "temperature"),
        ({"messages": []}, openai.UnprocessableEntityError, "invalid-request", "messages"),
        ({"messages": TURNS * 20}, openai.UnprocessableEntityError, "text-too-long", None),
    ],
)
def test_what_is_wrong_is_said_as_openai_says_it(client, changes, error, code, param):
    with pytest.raises(error) as refusal:
        client.chat.completions.create(**{"model": "red", "messages": TURNS} | changes)
    assert (refusal.value.code, refusal.value.param) == (code, param)
    assert refusal.value.body["message"]


def test_answers_satisfy_their_schema(client):
    def ask(model="json", schema=SCHEMA, **options):
        answer_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        request = {"model": model, "messages": TURNS, "response_format": answer_format} | options
        return client.chat.completions.create(**request)

    complete = 0
    for choice in ask(n=16, seed=1, temperature=1).choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            complete += 1
    assert complete > 4
    cut = ask(max_tokens=2, response_format={"type": "json_object"}).choices[0]
    assert (cut.message.content[0], cut.finish_reason) == ("{", "length")
    for refused, reason in ((ask, "film"), (lambda schema: ask("red"), "no token that ends a text")):
        with pytest.raises(openai.BadRequestError, match=reason) as refusal:
            refused(schema={"type": "film"})
        assert (refusal.value.code, refusal.value.param) == ("invalid-schema", "response_format")


def test_a_required_tool_is_called(client):
    function = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    options = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": function}]}
    answers = client.chat.completions.create(model="json", n=8, seed=1, tool_choice="required", **options).choices
    for answer in answers:
        if answer.finish_reason == "tool_calls":
            assert [call.function.name for call in answer.message.tool_calls] == ["f"]
            assert json.loads(answer.message.tool_calls[0].function.arguments) == {}
        else:
            assert answer.message.content.startswith("{")
    free = client.chat.completions.create(model="json", max_tokens=4, seed=1, **options).choices[0].message
    assert free.tool_calls is None
    assert free.content
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="red", **options)
    assert (refusal.value.code, refusal.value.param) == ("tools-not-supported", "tools")


def rate(client, **body):
    return client.post("/feedback", body={"rating": "up"} | body, cast_to=object)


def test_answers_and_streams_are_rated_by_their_id_in_the_owners_data_set_alone(site, client):
    request = {"model": "red", "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(messages=TURNS, **request)
    chunks = list(client.completions.create(prompt="It was", stream=True, **request))
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert rate(client, id=answer.id) == {"id": answer.id, "object": "feedback", "dataset": "ratings", "added": True}
    assert rate(client, id=chunks[0].id, rating="down", edit=" warm", comment="too short")["added"]
    store = DatasetStore(site.home.data)
    records = [record for split in store.about("ratings").records for _, record in store.records("ratings", split)]
    written = [{"role": "assistant", "content": answer.choices[0].message.content}]
    pair = {"prompt": "It was", "chosen": " warm", "rejected": streamed, "comment": "too short"}
    assert sorted(records, key=str) == sorted([{"prompt": TURNS, "completion": written, "label": True}, pair], key=str)
    for body, error, code, param in (
        ({"id": answer.id}, openai.ConflictError, "conflict", None),
        ({"id": "cmpl-unknown"}, openai.NotFoundError, "not-found", None),
        ({"id": "x", "edit": "y" * 1_000_000}, openai.UnprocessableEntityError, "invalid-request", "edit"),
        ({"id": "x", "rating": "good"}, openai.UnprocessableEntityError, "invalid-request", "rating"),
    ):
        with pytest.raises(error) as refusal:
            rate(client, **body)
        assert (refusal.value.code, refusal.value.param) == (code, param)


def test_without_the_option_feedback_is_refused_with_the_remedy(site):
    with (
        serving(site.home) as details,
        openai.OpenAI(base_url=details["url"], api_key=site.token) as client,
        pytest.raises(openai.PermissionDeniedError, match="with --feedback DATASET"),
    ):
        rate(client, id="x")


def test_a_stranger_is_refused_before_the_body(site, client):
    with pytest.raises(openai.AuthenticationError) as refusal:
        client.with_options(api_key="wrong").models.list()
    assert refusal.value.code == "invalid_api_key"
    announced = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
    for more in (b"\r\n", b"authorization: Bearer \xff\r\n\r\n", b"expect: 100-continue\r\n\r\n"):
        answer = status_line(site, announced + more)  # no body comes, and the answer does not wait for it
        assert answer.startswith(b"HTTP/1.1 401 ")


def test_sizes_methods_and_addresses_are_held(site, client):
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(model="red", prompt="x" * 5_000_000)
    assert (refusal.value.status_code, refusal.value.code) == (413, "too-large")
    key = b"authorization: Bearer " + site.token.encode() + b"\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" + key + b"\r\n"
    assert status_line(site, chunked + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 64).startswith(b"HTTP/1.1 413 ")
    assert status_line(site, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 40_000).startswith(b"HTTP/1.1 400 ")
    assert status_line(site, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert status_line(site, b"DELETE /v1/models HTTP/1.0\r\nhost: x\r\n" + key + b"\r\n").startswith(b"HTTP/1.1 405 ")
    assert status_line(site, b"GET /v1/files HTTP/1.0\r\nhost: x\r\n" + key + b"\r\n").startswith(b"HTTP/1.1 404 ")


def test_a_full_queue_refuses_and_clients_that_leave_make_room(site, client):
    request = {"model": "red", "prompt": ["It"] * 16, "max_tokens": 60}
    body = json.dumps(request).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {site.token}\r\n"
    waiting = [socket.create_connection(address(site)) for _ in range(4)]
    for connection in waiting:
        connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    answered = select.select(waiting, (), (), 30)[0]  # by the refusal of the one that arrived last
    assert answered[0].recv(65_536).startswith(b"HTTP/1.1 429 ")
    with pytest.raises(openai.RateLimitError) as refusal:
        client.completions.create(model="red", prompt="It", max_tokens=1)
    assert refusal.value.response.headers["retry-after"] == "1"
    for connection in waiting:
        connection.close()
    patient = client.with_options(max_retries=20)
    assert patient.completions.create(model="red", prompt="It", max_tokens=1).choices


def test_a_stream_that_its_client_leaves_ends(site, client):
    request = {"model": "red", "prompt": ["It"] * 16, "max_tokens": 60}
    for _ in range(6):  # twice as many as the queue takes
        with client.completions.create(**request, stream=True) as stream:
            next(iter(stream))
    assert client.with_options(max_retries=20).completions.create(model="red", prompt="It", max_tokens=1).choices


def test_it_ends_in_time_with_a_request_in_progress(rademacher, tmp_path):
    home = AgentHome(tmp_path / "home")
    home.create()
    keep_adapter(home, rademacher, new_private_key(), "red", seed=1)
    with serving(home) as details, openai.OpenAI(base_url=details["url"], api_key=details["token"]) as client:
        request = {"model": "red", "prompt": ["It"] * 16, "max_tokens": 60}
        next(iter(client.completions.create(**request, stream=True)))


def test_the_page_runs_as_it_stands(site):
    """docs/serving.md, without the line that starts the server."""
    page = (ROOT / "docs" / "serving.md").read_text().replace("http://127.0.0.1:8321/v1", site.url)
    shell, python = (
        re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1] for language in ("sh", "python")
    )
    start, *commands = shell.splitlines()
    assert start.startswith("mobizo-agent serve &")
    script = "\n".join([*commands, f"{sys.executable} - <<'END'", python, "END"]).replace("alice-movies", "red")
    environment = os.environ | {HOME_VARIABLE: str(site.home.path)}
    process = subprocess.run(["bash", "-ec", script], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert '"id":"red"' in process.stdout
    assert '"label":' in process.stdout
