"""Requests as OpenAI's clients write them, and as others do."""

import json

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from shared.openai.answers import TextOptions
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.scoring import MAX_NEW_TOKENS

TURNS = [{"role": "user", "content": "Hi."}]
# Fields of OpenAI's API that this one does not have, or that it has, as clients send them when nobody sets them.
NULLS = (
    *("audio", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
    *("metadata", "modalities", "n", "parallel_tool_calls", "prediction", "reasoning_effort", "response_format"),
    *("seed", "service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
)


def chat(**fields):
    return ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": TURNS} | fields))


def completion(**fields):
    return CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": "Hi."} | fields))


def test_null_is_absent():
    assert chat(**dict.fromkeys(NULLS)) == chat()
    assert chat(tools=[], functions=[], logit_bias={}, stop=[], stream_options={}, metadata={}) == chat()
    assert completion(suffix=None, echo=None, best_of=None, logprobs=None, logit_bias=None) == completion()
    assert TextOptions.of(chat(temperature=None, top_p=None, seed=5), 0) == TextOptions.of(chat(seed=5), 0)
    for fields in ({"messages": None}, {"messages": []}, {"model": None}, {"messages": [{"role": "user"}]}):
        with pytest.raises(ValidationError):
            chat(**fields)


@pytest.mark.parametrize("prompt", ["", [""], [[]], [1, "a"], [-1], [True], [[1], ["a"]], ["a", 1]])
def test_prompts_that_are_none_are_refused_by_the_fields_name(prompt):
    with pytest.raises(ValidationError) as refused:
        completion(prompt=prompt)
    assert all(error["loc"][0] == "prompt" and "function" not in str(error["loc"]) for error in refused.value.errors())


@pytest.mark.parametrize(
    "fields",
    [
        ChatCompletionMessage(role="assistant", content="Yes.").model_dump(),
        ChatCompletionMessage(role="assistant", content="Yes.", annotations=[], refusal=None).to_dict(),
        # LiteLLM's message
        {
            "content": "Yes.",
            "role": "assistant",
            "tool_calls": None,
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
            "annotations": [],
            "reasoning_content": None,
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Yes.", "annotations": []}]},
    ],
)
def test_the_message_of_an_answer_can_be_sent_back(fields):
    request = chat(messages=[*TURNS, fields, {"role": "user", "content": "Sure?", "name": None}])
    assert [message.turn for message in request.messages] == [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
        {"max_tokens": 0},
        {"store": True},
    ],
)
def test_what_would_change_the_text_is_refused(fields):
    with pytest.raises(ValidationError):
        chat(**fields)


def test_the_schema_of_an_answer():
    def schema(**response_format):
        return TextOptions.of(chat(response_format=response_format), 0).schema

    content = {"type": "array", "x-guidance": {"lenient": True}}
    named = {"name": "a", "schema": content, "strict": True, "description": None}
    assert json.loads(schema(type="json_schema", json_schema=named)) == {"type": "array"}
    assert json.loads(schema(type="json_schema", json_schema={"name": "a", "schema": {}})) == {"type": "object"}
    assert json.loads(schema(type="json_object")) == {"type": "object"}
    assert schema(type="text") is None


def test_a_large_number_of_tokens_is_lowered_to_the_limit():
    for fields in ({"max_tokens": 10**9}, {"max_completion_tokens": 2 * MAX_NEW_TOKENS, "max_tokens": 5}, {}):
        assert TextOptions.of(chat(**fields), 0).max_tokens == MAX_NEW_TOKENS
    assert TextOptions.of(completion(max_tokens=MAX_NEW_TOKENS + 1), 0).max_tokens == MAX_NEW_TOKENS
    assert TextOptions.of(chat(max_tokens=5), 0).max_tokens == 5
