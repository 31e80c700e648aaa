"""Chat templates, rendered as transformers renders them, read from a model's files, and what they may not do."""

import json

import gguf
import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from bench.programs import model_file
from server.catalog.chat_templates import read_chat_template
from server.compiler.checkpoints.base import BaseFiles
from shared.chat_template import ChatTemplate, InvalidConversation
from shared.errors import UnreadableCheckpoint

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# The shapes that the families of models use, written anew, with the constructs of Jinja that published templates need:
# ChatML (SmolLM2, Qwen2), header blocks (Llama 3), instruction brackets (Mistral), turns with their own role names
# (Gemma), role lines (Vicuna), and reasoning that is removed from earlier turns (Qwen3).
FAMILIES = {
    "chatml": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "headers": "{{- bos_token }}\n{%- set ns = namespace(n=0) %}\n{%- for m in messages %}\n"
    "    {%- set ns.n = ns.n + 1 %}"
    "{{- '<|h|>' + m.role + '<|e|>\n\n' + m.content | trim + '<|eot|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|h|>assistant<|e|>\n\n' }}{%- endif %}{# the end #}",
    "brackets": "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set first = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set first = '' %}{% endif %}"
    "{% for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (first ~ ' ' if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "turns": "{{ bos_token }}{% for m in messages %}{%- if m.role == 'system' -%}{% continue %}{%- endif -%}"
    "{{ '<turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}{{ m['content'] | tojson }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "reasoning": "{%- macro turn(role, text) %}{{- '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}"
    "{%- endmacro %}"
    "{%- set ns = namespace(last=messages | length - 1, open=true) %}\n"
    "{%- for m in messages[::-1] %}{%- set at = messages | length - 1 - loop.index0 %}\n"
    "{%- if ns.open and m.role == 'user' and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}"
    "{%- set ns.open = false %}{%- set ns.last = at %}{%- break %}{%- endif %}{%- endfor %}\n"
    "{%- if strftime_now is defined %}{{- turn('system', 'It is ' ~ strftime_now('%Y') ~ '.') }}{%- endif %}\n"
    "{%- if tools %}{{- turn('tools', tools | tojson(indent=2)) }}{%- endif %}\n"
    "{%- for m in messages %}{%- if m.content is string %}{%- set text = m.content %}{%- else %}{%- set text = '' %}"
    "{%- endif %}\n{%- if m.role == 'assistant' and '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}\n"
    "{%- if loop.index0 > ns.last %}{{- turn('thought', thought) }}{%- endif %}{%- endif %}{{- turn(m.role, text) }}"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>' }}{%- endif %}"
    "{%- endif %}",
    "lines": "{% for m in messages %}\n  {% if m['role'] == 'user' %}\n{{ 'USER: ' ~ m['content'] }}\n"
    "  {% elif m['role'] == 'system' %}\n{{ m['content'] }}\n  {% else %}\n"
    "ASSISTANT: {{ m['content'] }}{{ eos_token }}\n"
    "  {% endif %}\n{% endfor %}\n{{ 'ASSISTANT:' if add_generation_prompt else '' }}",
}
CONVERSATIONS = (
    [{"role": "user", "content": ' Grüße, <b>"you"</b> '}],
    [{"role": "system", "content": "Short."}, {"role": "user", "content": "a\nb"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "<tool>c</tool>"},
    ],
)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_rendered_as_by_transformers(family):
    template = ChatTemplate(template=FAMILIES[family], tokens=TOKENS)
    for messages in CONVERSATIONS:
        for answer in (True, False):
            (expected,), _ = render_jinja_template(
                conversations=[messages], chat_template=FAMILIES[family], add_generation_prompt=answer, **TOKENS
            )
            assert template.render(messages, answer=answer) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages.__class__.__mro__ }}", "may not"),
        ("{% set _ = messages.append('x') %}", "may not"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[0].content + 1 }}", "does not take"),
        ("{% for m in messages %}", "endfor"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 9000 }}{% endfor %}{% endfor %}", "more than"),
    ],
)
def test_what_a_template_may_not_do(template, reason):
    with pytest.raises(InvalidConversation, match=reason):
        ChatTemplate(template=template).render(CONVERSATIONS[0])


def test_a_template_apart_is_held_to_time_and_memory():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidConversation, match="within 1 seconds"):
        ChatTemplate(template=endless).render_in_subprocess(CONVERSATIONS[0], seconds=1)
    with pytest.raises(InvalidConversation, match="MiB of memory"):
        ChatTemplate(template="{{ ('x' * 9999999999) | length }}").render_in_subprocess(CONVERSATIONS[0])
    with pytest.raises(InvalidConversation, match="only one turn"):
        ChatTemplate(template="{{ raise_exception('only one turn') }}").render_in_subprocess(CONVERSATIONS[0])
    template = ChatTemplate(template=FAMILIES["turns"], tokens=TOKENS)
    assert template.render_in_subprocess(CONVERSATIONS[0]) == template.render(CONVERSATIONS[0])


def write_files(directory, template, **files):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | (
        {} if template is None else {"chat_template": template}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (directory / name.replace("_jinja", ".jinja")).write_text(text)
    return BaseFiles("huggingface", directory, ())


def test_a_template_comes_from_the_models_files(tmp_path):
    assert read_chat_template(write_files(tmp_path, None)) is None
    assert read_chat_template(write_files(tmp_path, FAMILIES["chatml"])) == ChatTemplate(
        template=FAMILIES["chatml"], tokens=TOKENS
    )
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": FAMILIES["lines"]}]
    assert read_chat_template(write_files(tmp_path, several)).template == FAMILIES["lines"]
    chat_template = read_chat_template(write_files(tmp_path, several, chat_template_jinja=FAMILIES["turns"]))
    assert chat_template.template == FAMILIES["turns"]


@pytest.mark.parametrize(
    ("template", "reason"), [("{% if %}", "cannot be used"), ("{% if false %}x{% endif %}", "renders nothing")]
)
def test_a_template_that_cannot_be_used_is_refused_when_the_base_is_registered(tmp_path, template, reason):
    with pytest.raises(UnreadableCheckpoint, match=reason):
        read_chat_template(write_files(tmp_path, template))


def test_a_template_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("server.catalog.chat_templates.CHECK_SECONDS", 3.0)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}"
    with pytest.raises(UnreadableCheckpoint, match="does not render a short conversation within 3 seconds"):
        read_chat_template(write_files(tmp_path, endless))


@pytest.mark.parametrize("number", [0, 1, 4_294_967_295])
def test_a_special_token_that_the_vocabulary_lacks_is_none(tmp_path, number):
    """Some files number their missing tokens so."""
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_token_list(["<s>"])
    writer.add_bos_token_id(number)
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    chat_template = read_chat_template(BaseFiles("gguf", tmp_path / "a.gguf", ()))
    assert chat_template.tokens == ({"bos_token": "<s>"} if number == 0 else {})


@pytest.mark.slow
def test_the_real_models_conversations_are_the_same_tokens_as_by_transformers():
    """SmolLM2's own template and tokenizer, as transformers reads both from the same file."""
    path = model_file()
    stock = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    template = read_chat_template(BaseFiles("gguf", path, ()))
    for messages in CONVERSATIONS:
        for answer in (True, False):
            expected = stock.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
            text = template.render(messages, answer=answer)
            assert stock.backend_tokenizer.encode(text, add_special_tokens=False).ids == expected


def test_a_template_that_calls_itself_is_refused_in_words():
    template = ChatTemplate(template="{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
    with pytest.raises(InvalidConversation, match="calls itself"):
        template.render([{"role": "user", "content": "x"}])
