"""Tool calls of every known family, in prompts as transformers writes them, and out of answers."""

import json

import jsonschema
import pytest
from pydantic import ValidationError
from transformers.utils.chat_template_utils import render_jinja_template

from shared.chat_template import ChatTemplate
from shared.openai.requests import ChatRequest
from shared.openai.tools import ToolsNotSupported, ToolUse

TURNS = [{"role": "user", "content": "Is it warm?"}]
# The constructs of the families' templates, written anew: Hermes and Qwen, Mistral, Llama 3.
TEMPLATES = {
    "hermes": "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    '{{- \'</tools>\\nAnswer:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>\' }}{%- endif %}'
    "{%- for m in messages %}{{- m.role + ':' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}{%- endfor %}",
    "mistral": "{{- '[AVAILABLE_TOOLS] [' + tools[0].function.name + ']' if tools else '' }}"
    "{%- for m in messages %}{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{{- call.function | tojson }}{{- ', \"id\": ' + call.id }}{%- endfor %}{{- ']' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.tool_call_id + m.content }}"
    "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}",
    "llama": "{%- if tools %}{{- 'Respond in the format {\"name\": function name, '}}"
    "{{- '\"parameters\": dictionary of argument name and its value}.' }}"
    "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{%- if m.tool_calls %}{{- m.tool_calls[0].function.arguments | tojson }}"
    "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}",
}
CALL = '{"name": "look", "%s": {"place": "Oslo", "days": [1, 2]}}'
ANSWERS = {
    "hermes": "<tool_call>\n" + CALL % "arguments" + "\n</tool_call>",
    "mistral": "[TOOL_CALLS] [" + CALL % "arguments" + "]",
    "llama": CALL % "parameters",
}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "A function.", "parameters": schema}}


TOOLS = [tool("look", place={"type": "string"}), tool("wait")]


def chat(**fields):
    fields = {"model": "m", "messages": TURNS, "tools": TOOLS} | fields
    return ChatRequest.model_validate_json(json.dumps(fields))


def use(family, **fields):
    return ToolUse.of(chat(**fields), ChatTemplate(template=TEMPLATES[family]))


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_are_written_as_by_transformers_and_read_back(family):
    content, (call,) = use(family).read(ANSWERS[family])
    assert (content, call.function.name) == (None, "look")
    assert json.loads(call.function.arguments) == {"place": "Oslo", "days": [1, 2]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Cold."}
    request = chat(messages=[*TURNS, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}, result])
    turns = [message.turn for message in request.messages]
    function = {"name": "look", "arguments": {"place": "Oslo", "days": [1, 2]}}
    assert turns[1]["tool_calls"] == [{"id": call.id, "type": "function", "function": function}]
    (expected,), _ = render_jinja_template(conversations=[turns], chat_template=TEMPLATES[family], tools=TOOLS)
    template = ChatTemplate(template=TEMPLATES[family])
    assert template.render(turns, answer=False, tools=request.tool_descriptions) == expected
    assert template.render_in_subprocess(turns, answer=False, tools=request.tool_descriptions) == expected
    assert "Oslo" in expected


def test_content_and_several_calls():
    wait = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>'
    content, calls = use("hermes").read(f"Let me see.\n{ANSWERS['hermes']}\n{wait}")
    assert content == "Let me see."
    assert [call.function.name for call in calls] == ["look", "wait"]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "It is warm."),
        ("hermes", '<tool_call>\n{"name": "look", "arguments": {"place": "Os'),
        ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": "Oslo"}</tool_call>'),
        ("hermes", '<tool_call>["look"]</tool_call>'),
        ("hermes", f"<tool_call>{'[' * 20_000}</tool_call>"),
        ("mistral", '[TOOL_CALLS] {"name": "look"}'),
        ("mistral", "[TOOL_CALLS] 7"),
        ("llama", "7"),
        ("llama", '{"parameters": {}}'),
        ("llama", '{"name": ["look"], "parameters": {}}'),
        ("llama", ""),
    ],
)
def test_a_call_that_does_not_parse_is_content(family, text):
    assert use(family).read(text) == (text, ())


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_required_call_has_a_schema(family):
    one = use(family, tool_choice={"type": "function", "function": {"name": "look"}})
    either = use(family, tool_choice="required")
    call = {"name": "look", one.format.arguments: {"place": "Oslo"}}
    other = {"name": "wait", one.format.arguments: {}}
    write = (lambda value: [value]) if family == "mistral" else (lambda value: value)
    jsonschema.validate(write(call), json.loads(one.schema))
    jsonschema.validate(write(other), json.loads(either.schema))
    for wrong in (other, call | {one.format.arguments: {}}, call | {one.format.arguments: {"place": 7}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(write(wrong), json.loads(one.schema))
    content, (read,) = one.read(json.dumps(write(call)))
    assert (content, read.function.arguments) == (None, '{"place": "Oslo"}')
    assert ANSWERS[family].startswith(one.prompt_end)
    assert use(family).schema is use(family, tool_choice="auto").schema is None
    assert use(family).prompt_end == ""


def test_tools_of_an_unknown_format_are_refused_by_name():
    for template in ("{{ messages[0].content }}", "{{ tools }}", "{{ tools }}<tool_call>\\n<function=", "<tool_call>{"):
        with pytest.raises(ToolsNotSupported, match=r"^tools: \w") as refused:
            ToolUse.of(chat(), ChatTemplate(template=template))
        assert refused.value.extra["errors"][0]["field"] == "tools"
        assert ToolUse.of(chat(tool_choice="none"), ChatTemplate(template=template)) is None
        assert ToolUse.of(chat(tools=[]), ChatTemplate(template=template)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "delete"}}},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "retrieval"}]},
        {"tools": [tool("a b")]},
        {"messages": [{"role": "tool", "content": "Cold."}]},
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
        {"messages": [{"role": "assistant"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "7"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{"}}]}]},
    ],
)
def test_requests_that_do_not_fit_together_are_refused(fields):
    with pytest.raises(ValidationError):
        chat(**fields)
