"""OpenAI's routes, asked by the unmodified `openai` client, against transformers with peft."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import openai
import pytest
import torch
from sqlalchemy import select
from tokenizers import Tokenizer, decoders, models

from server.catalog.bases import BaseModelEntry
from shared.access import Role
from shared.chat_template import ChatTemplate
from tests.other_clients import answers_of, other_clients, plain_answers
from tests.server.homes import SHAPE

TOLERANCE = 1e-3  # nats
TURNS = [{"role": "system", "content": "a very"}, {"role": "user", "content": "good film"}]
TEMPLATE = "{% for turn in messages %}{{ 'x ' if turn['role'] == 'user' }}{{ turn['content'] + ' ' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'It was' }}{% endif %}"
RENDERED = "a very x good film It was"
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "additionalProperties": False,
}
ARGUMENTS["$defs"] = {"b": {"enum": ["b", "cd", 1]}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("f", "g")]


@pytest.fixture(scope="module")
def client(site):
    site.fleet.home.change(BaseModelEntry, chat_template=ChatTemplate(template=TEMPLATE))
    token = site.fleet.home.token(Role.APP)
    with openai.OpenAI(base_url=f"{site.fleet.url}/v1", api_key=token, max_retries=0) as client:
        yield client


def expected_text(site, adapter, prompt, count, tenant="default"):
    return site.tokenizer.decode(site.continued(tenant, adapter, prompt, count))


def same(text, expected):
    assert text.split() == expected.split()


def test_models_are_the_tenants_adapters_and_the_bases(site, client):
    models = {model.id: model for model in client.models.list()}
    assert {"red", "one", "two", "tiny"} <= set(models)
    assert "secret" not in models  # another tenant's
    assert (models["red"].owned_by, models["red"].parent) == ("default", "tiny")
    assert models["tiny"].owned_by == "base"
    assert client.models.retrieve("red@v1").parent == "tiny"
    with pytest.raises(openai.NotFoundError) as error_info:
        client.models.retrieve("secret")
    assert error_info.value.code == "model_not_found"


@pytest.mark.parametrize("model", ["red", "two@v1", "tiny"])
def test_a_completion_is_that_of_stock_peft(site, client, model):
    adapter = None if model == "tiny" else model.partition("@")[0]
    completion = client.completions.create(model=model, prompt=["a film", "It was"], max_tokens=6, temperature=0)
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice, prompt in zip(completion.choices, ("a film", "It was"), strict=True):
        same(choice.text, expected_text(site, adapter, prompt, 6))
        assert choice.finish_reason == "length"
    prompt_tokens = sum(len(site.tokenizer.encode(prompt).ids) for prompt in ("a film", "It was"))
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (prompt_tokens, 12)


def test_a_chat_uses_the_bases_own_template(site, client):
    whole = client.chat.completions.create(model="red", messages=TURNS, max_completion_tokens=8, temperature=0)
    (choice,) = whole.choices
    same(choice.message.content, expected_text(site, "red", RENDERED, 8))
    assert choice.message.content
    assert whole.usage.prompt_tokens == len(site.tokenizer.encode(RENDERED, add_special_tokens=False).ids)
    assert (
        whole.system_fingerprint
        == client.chat.completions.create(model="red@v1", messages=TURNS, max_tokens=1).system_fingerprint
    )  # the version's revision
    chunks = list(
        client.chat.completions.create(
            model="red",
            messages=TURNS,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, end, usage = chunks
    assert "".join(piece.choices[0].delta.content for piece in pieces) == choice.message.content
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert len(pieces) > 2
    assert end.choices[0].finish_reason == choice.finish_reason
    assert usage.usage == whole.usage


@torch.no_grad()
def test_log_probabilities_are_those_of_stock_peft(site, client):
    options = {"model": "one", "max_tokens": 5, "temperature": 0}
    chat = client.chat.completions.create(messages=TURNS, logprobs=True, top_logprobs=3, **options).choices[0]
    plain = client.completions.create(prompt=RENDERED, logprobs=3, **options).choices[0]
    tokens = site.continued("default", "one", RENDERED, 5)
    before = site.tokenizer.encode(RENDERED).ids
    logits = site.stock["default", "one"](torch.tensor([before + tokens])).logits[0].double()
    chances = torch.log_softmax(logits, -1)[len(before) - 1 : -1]
    expected = [float(row[token]) for row, token in zip(chances, tokens, strict=True)]
    np.testing.assert_allclose([each.logprob for each in chat.logprobs.content], expected, atol=TOLERANCE)
    np.testing.assert_allclose(plain.logprobs.token_logprobs, expected, atol=TOLERANCE)
    for row, each in zip(chances, chat.logprobs.content, strict=True):
        top = sorted((float(value) for value in row), reverse=True)[:3]
        np.testing.assert_allclose([likely.logprob for likely in each.top_logprobs], top, atol=TOLERANCE)
        assert bytes(each.bytes).decode() == each.token
    assert len(plain.logprobs.text_offset) == 5


@other_clients
def test_other_libraries_hold_a_conversation(site, client, name):
    url, token = f"{site.fleet.url}/v1", site.fleet.home.token(Role.APP)
    assert answers_of(name, url, token, "red", "good film") == plain_answers(client, "red", "good film")


def test_prompts_may_be_tokens(site, client):
    options = {"model": "red", "max_tokens": 6, "temperature": 0}
    tokens = site.tokenizer.encode("a film").ids
    texts = client.completions.create(prompt=["a film", "It was"], **options).choices
    assert client.completions.create(prompt=tokens, **options).choices[0].text == texts[0].text
    several = client.completions.create(prompt=[tokens, site.tokenizer.encode("It was").ids], **options).choices
    assert [choice.text for choice in several] == [choice.text for choice in texts]
    with pytest.raises(openai.UnprocessableEntityError, match="has the token 99999") as error_info:
        client.completions.create(prompt=[*tokens, 99_999], **options)
    assert error_info.value.code == "unknown-token"


def test_a_text_ends_at_the_bases_own_tokens(site, client):
    """Whether the tokenizer flags them as special or not, as transformers does."""
    options = {"model": "red", "prompt": "a film", "temperature": 0, "max_tokens": 6}
    tokens = site.continued("default", "red", "a film", 6)
    stop = next(token for at, token in enumerate(tokens) if at and token not in tokens[:at])
    site.fleet.home.change(BaseModelEntry, end_tokens=[stop])
    try:
        choice = client.completions.create(**options).choices[0]
    finally:
        site.fleet.home.change(BaseModelEntry, end_tokens=[])
    same(choice.text, site.tokenizer.decode(tokens[: tokens.index(stop)]))
    assert choice.finish_reason == "stop"


def test_stops_seeds_and_several_texts(site, client):
    options = {"model": "two", "prompt": "a film", "max_tokens": 12}
    whole = client.completions.create(temperature=0, **options).choices[0].text
    stop = whole.split()[-1]
    stopped_choice = client.completions.create(temperature=0, stop=stop, **options).choices[0]
    assert (stopped_choice.text, stopped_choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    texts = [[choice.text for choice in client.completions.create(n=4, seed=5, **options).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(n=4, seed=5, stream=True, **options):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts[0]
    likeliest = client.completions.create(temperature=1.5, top_p=1e-9, seed=1, **options).choices[0].text
    assert likeliest == whole  # the likeliest token alone has that share


@pytest.mark.parametrize(
    ("changes", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        ({"model": "secret"}, openai.NotFoundError, "model_not_found", "model"),
        ({"model": "red@v9"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.UnprocessableEntityError, "invalid-request", "temperature"),
        ({"messages": []}, openai.UnprocessableEntityError, "invalid-request", "messages"),
        ({"tools": [{"type": "function"}]}, openai.UnprocessableEntityError, "invalid-request", "tools.0.function"),
        ({"tools": TOOLS}, openai.BadRequestError, "tools-not-supported", "tools"),
        ({"presence_penalty": 1}, openai.UnprocessableEntityError, "invalid-request", "presence_penalty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, openai.UnprocessableEntityError, "invalid-request", None),
        ({"messages": TURNS * 20}, openai.UnprocessableEntityError, "text-too-long", None),
    ],
)
def test_what_is_wrong_is_said_as_openai_says_it(client, changes, error, code, param):
    with pytest.raises(error) as error_info:
        client.chat.completions.create(**{"model": "red", "messages": TURNS} | changes)
    assert error_info.value.code == code
    assert param is None or error_info.value.param == param
    assert error_info.value.body["message"]
    assert error_info.value.body["type"] == "invalid_request_error"


def test_a_token_without_the_scope_and_none_at_all(site, client):
    with pytest.raises(openai.AuthenticationError) as error_info:
        client.with_options(api_key="wrong").models.list()
    assert error_info.value.code == "invalid_api_key"
    device = site.fleet.device("default", "listener", users=("nobody",))
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key=device.headers["authorization"].removeprefix("Bearer ")).models.list()


def test_a_base_without_a_template_continues_prompts_only(site, client):
    site.fleet.home.change(BaseModelEntry, chat_template=None)
    try:
        with pytest.raises(openai.UnprocessableEntityError) as error_info:
            client.chat.completions.create(model="red", messages=TURNS)
        assert error_info.value.code == "no-chat-template"
    finally:
        site.fleet.home.change(BaseModelEntry, chat_template=ChatTemplate(template=TEMPLATE))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["b", "cd"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def under(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture
def json_client(site, client):
    """The tiny base with a tokenizer of as many tokens that can write JSON."""
    marks = '{}[]":,-01234567abcdefgilmnrstu'
    tokenizer = Tokenizer(models.BPE({mark: number for number, mark in enumerate(marks)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.get_vocab_size() == SHAPE.vocabulary
    home = site.fleet.home
    before = home.scalar(select(BaseModelEntry.tokenizer_sha256))
    stored = home.artifacts.put(tokenizer.to_str().encode())
    hermes = "{# <tool_call>{ #}{% if tools %}{{ tools | length }}{% endif %}"
    home.change(BaseModelEntry, tokenizer_sha256=stored, chat_template=ChatTemplate(template=hermes + TEMPLATE))
    yield client
    home.change(BaseModelEntry, tokenizer_sha256=before, chat_template=ChatTemplate(template=TEMPLATE))


def test_answers_satisfy_their_schema(json_client):
    """The cut ones are beginnings of such an answer; all of them share their batches with other texts."""
    complete = 0
    options = {"model": "red", "messages": TURNS, "temperature": 1}
    plain = json_client.chat.completions.create(**options, max_tokens=40, seed=7)
    with ThreadPoolExecutor() as pool:
        create = json_client.chat.completions.create
        beside = pool.submit(create, **options, max_tokens=40, seed=7)
        requests = [
            pool.submit(create, **options, n=8, seed=8 * seed, response_format=under(SCHEMA)) for seed in range(3)
        ]
        impossible = pool.submit(create, **options, response_format=under({"enum": ["z"]}))
        anything = pool.submit(create, **options, n=8, seed=1, response_format={"type": "json_object"})
        for choice in [choice for request in requests for choice in request.result().choices]:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
                complete += 1
            else:
                assert choice.finish_reason == "length"
        for choice in anything.result().choices:
            assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            impossible.result()
        assert refused.value.code == "no-token-allowed"
        assert beside.result().choices[0].message == plain.choices[0].message
    assert complete > 12


def test_json_is_streamed_and_ends_at_max_tokens(json_client):
    options = {"model": "one", "messages": TURNS, "seed": 3, "response_format": under(SCHEMA)}
    whole = json_client.chat.completions.create(**options).choices[0]
    *pieces, end = json_client.chat.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == whole.message.content
    assert end.choices[0].finish_reason == whole.finish_reason
    cut = json_client.chat.completions.create(**options, max_tokens=5).choices[0]
    assert (cut.finish_reason, len(cut.message.content)) == ("length", 5)
    assert whole.message.content.startswith(cut.message.content)


@pytest.mark.parametrize(
    ("response_format", "status"),
    [
        (under({"type": "film"}), 400),
        (under({"$ref": "file:///etc/passwd"}), 400),
        (under({"enum": ["x" * 100_000]}), 400),
        ({"type": "json_schema"}, 422),
        ({"type": "grammar"}, 422),
    ],
)
def test_a_format_that_cannot_be_kept_is_refused_by_name(json_client, response_format, status):
    with pytest.raises(openai.APIStatusError) as refused:
        json_client.chat.completions.create(model="red", messages=TURNS, response_format=response_format)
    assert refused.value.status_code == status
    assert refused.value.param.startswith("response_format")
    assert refused.value.body["type"] == "invalid_request_error"


def test_a_base_whose_texts_never_end_writes_no_json(client):
    with pytest.raises(openai.BadRequestError, match="no token that ends a text"):
        client.chat.completions.create(model="red", messages=TURNS, response_format={"type": "json_object"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_required_tool_is_called(json_client, choice):
    options = {"model": "red", "messages": TURNS, "tools": TOOLS, "tool_choice": choice, "n": 4, "seed": 1}
    choices = json_client.chat.completions.create(**options).choices
    for answer in choices:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.function.name in ("f", "g") if choice == "required" else call.function.name == "g"
        jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)
    streamed = {}
    for chunk in json_client.chat.completions.create(**options, stream=True):
        (piece,) = chunk.choices
        assert piece.delta.content is None
        if piece.finish_reason is not None:
            (delta,) = piece.delta.tool_calls
            assert (piece.finish_reason, delta.index) == ("tool_calls", 0)
            streamed[piece.index] = delta.function
    assert [streamed[index] for index in range(4)] == [
        streamed[0].model_validate(answer.message.tool_calls[0].function.model_dump()) for answer in choices
    ]
    turns = [*TURNS, choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "b"}]
    options = {"model": "red", "tools": TOOLS, "seed": 1, "max_tokens": 4}
    after = json_client.chat.completions.create(messages=turns, **options)
    assert after.choices[0].message.tool_calls is None
    assert after.choices[0].message.content == "".join(
        chunk.choices[0].delta.content or ""
        for chunk in json_client.chat.completions.create(messages=turns, stream=True, **options)
    )
