"""Tests that chat templates render the same text as they do in transformers, that messages cannot inject
control tokens, and that refusals state a reason."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from appliance.text.chat_template import ChatTemplate
from appliance.text.template_files import MAX_TEMPLATE_BYTES, read_template_sources
from appliance.text.template_messages import ChatTemplateError
from appliance.text.tokenizer import Tokenizer
from appliance.text.tokenizer_files import MAX_JSON_BYTES, TokenizerFilesError
from tests.text.conftest import TEMPLATE, byte_level, write_model

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]

RICH = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
{%- endif %}
{{ bos_token }}[{{ system }}]
{{ tools is none }}{{ messages | tojson(indent=2) }}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}<{{ message.role }}>{{ message['content'] }}{% endgeneration %}
    {% if message.name is defined %}#{{ message.name }}{% endif %}
{%- endfor %}
{{ '-' * 3 }}{{ ns.count }}{{ documents is none }}{{ dict(a=1) | tojson }}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def template(source: str, **bounds: int) -> ChatTemplate:
    return ChatTemplate({"default": source}, NAMES, **bounds)


CONTENT = st.sampled_from(["{{ 7 * 7 }}", "{% raise %}", "<b>&'\"", "\ud800", "中文 ", ""]) | st.text(
    max_size=12
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "skip"]), "content": CONTENT},
    optional={"name": CONTENT},
)


@given(messages=st.lists(MESSAGE, min_size=1, max_size=5), prompt=st.booleans())
def test_rendering_equals_transformers(messages, prompt):
    expected, _ = render_jinja_template([messages], chat_template=RICH, add_generation_prompt=prompt, **NAMES)
    assert template(RICH).render(messages, prompt) == expected[0]


def test_messages_are_data_and_never_template_text():
    hostile = "{{ ''.__class__.__mro__ }}{% for i in range(99) %}x{% endfor %}"
    assert hostile in template(TEMPLATE).render([{"role": "user", "content": hostile}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.__base__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set ns = namespace() %}{% set ns.__call__ = messages %}stored",
        "{{ namespace(__class__=1) and 'stored' }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    try:
        reached = template(source).render(USER)
    except ChatTemplateError:
        reached = ""
    assert reached == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages: TypeError"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (
            "{% for i in range(9) %}{{ messages[0].content * 20 }}{% endfor %}",
            "exceed the limit of 100 characters",
        ),
        ("{{ 'x' * 10 ** 9 }}", "more than 100 characters"),
        ("{{ 10 ** 10 ** 9 }}", "too large"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_failing_or_endless_template_is_refused_with_the_reason(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        template(source, max_characters=100).render(USER)


def test_a_refusal_that_quotes_the_message_is_short_and_encodable():
    chat = template("{{ raise_exception('unknown role ' + messages[0].role) }}")
    with pytest.raises(ChatTemplateError) as caught:
        chat.render([{"role": "\ud800" * 100_000, "content": ""}])
    assert str(caught.value).encode().startswith(b"unknown role ??")
    assert len(str(caught.value)) < 1000


def test_a_model_without_default_template_says_to_use_completions():
    with pytest.raises(ChatTemplateError, match=r"only \['tool_use'\]; use /v1/completions"):
        ChatTemplate({"tool_use": TEMPLATE}, NAMES).render(USER)


def test_a_template_file_takes_precedence_over_the_config(tmp_path):
    def chat(folder) -> ChatTemplate:
        return ChatTemplate(read_template_sources(folder), NAMES)

    folder = write_model(tmp_path, byte_level(), chat_template=TEMPLATE)
    assert chat(folder).render(USER) == "<s><|user|>Hi</s><|assistant|>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    both = chat(write_model(tmp_path, byte_level(), chat_template=named))
    assert both.render(USER) == "plain"
    (folder / "chat_template.jinja").write_text("file")
    assert chat(folder).render(USER) == "file"


@pytest.mark.parametrize("value", [[{"name": "x"}], 7])
def test_a_template_of_the_wrong_shape_is_refused_at_load(tmp_path, value):
    with pytest.raises(TokenizerFilesError, match="must be a text or a list"):
        read_template_sources(write_model(tmp_path, byte_level(), chat_template=value))


def test_a_template_that_is_not_jinja_is_refused():
    with pytest.raises(ChatTemplateError, match="not valid Jinja2"):
        template("{% if %}")


def test_a_template_file_is_a_regular_file_of_bounded_size(tmp_path):
    folder = write_model(tmp_path, byte_level())
    path = folder / "chat_template.jinja"
    path.write_bytes(b" " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(TokenizerFilesError, match=f"the limit is {MAX_TEMPLATE_BYTES} bytes"):
        read_template_sources(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TokenizerFilesError, match="not a regular file"):
        read_template_sources(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_json_file_of_a_tokenizer_is_a_regular_file_of_bounded_size(tmp_path, name):
    folder = write_model(tmp_path, byte_level())
    path = folder / name
    path.touch()
    os.truncate(path, MAX_JSON_BYTES + 1)
    with pytest.raises(TokenizerFilesError, match=f"the limit is {MAX_JSON_BYTES} bytes"):
        Tokenizer.load(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TokenizerFilesError, match="is not a regular file"):
        Tokenizer.load(folder)
