from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tokenmill.errors import InvalidRequest, ModelUnreadable
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.wire.messages import ChatPrompt

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
    "[{{ m.role }}] {{ m.content | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part is string %}{{ raise_exception('parts please') }}{% endif %}{{ part.text }}|{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}\n{% endfor %}"
)
TOOLS = (
    "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if documents %}{{ documents[0].text }}{% endif %}"
    "{%- for m in messages %}{% generation %}{{ m.role }}={{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}{{ key }}:{{ value | tojson }}"
    "{% endfor %}){% endfor %}{% endgeneration %}\n{% endfor %}{{ enable_thinking is defined and enable_thinking }}"
)
PICKY = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
USER = {"role": "user", "content": "Grüße <b>\n"}
ANSWER = {"role": "assistant", "content": " one  two "}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def prompt(*messages: Any, **options: Any) -> ChatPrompt:
    return ChatPrompt(messages=list(messages), **options)


def oracle(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text that transformers makes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", **options)
    return str(rendered[0])


@pytest.mark.parametrize("template", [CHATML, TRIMMED, EITHER, TOOLS])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER], [USER, ANSWER, USER]])
def test_same_text_as_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>"})
    for add in (True, False):
        text = ours.render(prompt(*messages, add_generation_prompt=add))
        assert text == oracle(template, messages, add_generation_prompt=add)
    if messages[-1]["role"] == "assistant":
        text = ours.render(prompt(*messages, add_generation_prompt=False, continue_final_message=True))
        assert text == oracle(template, messages, continue_final_message=True)
        assert text.rstrip().endswith("one  two")


def test_tools_documents_and_options() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": 2}}}
    options = {"documents": [{"title": "t", "text": "doc"}], "enable_thinking": True}
    ours = ChatTemplate(TOOLS).render(
        prompt(
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            tools=[TOOL],
            template_kwargs=options,
        )
    )
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert ours == oracle(TOOLS, messages, tools=[TOOL], **options)


@pytest.mark.parametrize(
    ("template", "takes_text", "takes_parts", "text"),
    [
        (CHATML, True, False, "a\nb"),
        ("{{ messages[0].content }}", True, False, "a\nb"),
        (EITHER, True, True, "ab"),
        (PARTS_ONLY, False, True, "a|b|"),
    ],
)
def test_content_parts(template: str, takes_text: bool, takes_parts: bool, text: str) -> None:
    ours = ChatTemplate(template)
    assert (ours.takes_text, ours.takes_parts) == (takes_text, takes_parts)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text in ours.render(prompt({"role": "user", "content": parts}))


def test_text_for_a_template_that_takes_parts_only() -> None:
    assert ChatTemplate(PARTS_ONLY).render(prompt({"role": "user", "content": "hi"})) == "user:hi|"


def test_continuing_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    final = prompt({"role": "assistant", "content": parts}, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(PARTS_ONLY).render(final) == "assistant:a|b"
    assert ChatTemplate(CHATML).render(final) == "<|im_start|>assistant\na\nb"


def test_developer_is_system_where_it_is_not_known() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert "system\nBe brief." in ChatTemplate(CHATML).render(prompt(message))
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}D{% endif %}{{ messages[0].content }}")
    assert knows.render(prompt(message)) == "DBe brief."


def test_time_is_known() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(prompt(USER)) in {
        str(datetime.now().year),
        str(datetime.now().year - 1),
    }


@pytest.mark.parametrize(
    ("template", "bad", "words"),
    [
        (PICKY, prompt(SYSTEM, USER), "System role not supported"),
        ("{{ messages[0].nope.deep }}", prompt(USER), "nope"),
        ("{{ 1 / 0 }}", prompt(USER), "division"),
        ("{% for x in range(10**9) %}{% endfor %}", prompt(USER), "range"),
        ("{{ messages.append(1) }}", prompt(USER), "unsafe"),
        ("{{ ''.__class__.__mro__ }}", prompt(USER), "unsafe"),
        (CHATML, prompt(USER, continue_final_message=True), "contradict"),
        (CHATML, prompt(USER, continue_final_message=True, add_generation_prompt=False), "assistant"),
        ("{{ 'x' }}", prompt(ANSWER, continue_final_message=True, add_generation_prompt=False), "does not show"),
    ],
)
def test_what_is_refused(template: str, bad: ChatPrompt, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        ChatTemplate(template).render(bad)
    assert caught.value.param in ("messages", "continue_final_message")


def test_own_variables_cannot_be_replaced() -> None:
    with pytest.raises(InvalidRequest, match="messages cannot be set") as caught:
        ChatTemplate(CHATML).render(prompt(USER, template_kwargs={"messages": []}))
    assert caught.value.param == "chat_template_kwargs"
    assert ChatTemplate("{{ self_ }}").render(prompt(USER, template_kwargs={"self": 1, "self_": 2})) == "2"


def test_a_broken_template_is_named() -> None:
    with pytest.raises(ModelUnreadable, match="line 2"):
        ChatTemplate("a\n{% if %}")
