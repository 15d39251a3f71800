"""Chat messages to the text of a prompt: the model's jinja2 template in a sandbox, with the environment that
transformers gives it (documented under "Writing a chat template").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from tokenmill.errors import InvalidRequest, ModelUnreadable
from tokenmill.text.plain_tools import in_plain_words
from tokenmill.wire.messages import ChatPrompt

PROBE = "tokenmill probe"
PROBE_FUNCTION = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
END_MARK = "\U0010fff0"
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """A compiled jinja2 template, with variables such as `bos_token`; raises ModelUnreadable when it is not valid."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise ModelUnreadable(
                f"the chat template is not valid jinja2, line {line}: {error}. Give another with --chat-template"
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._knows_developer = "developer" in source
        self.takes_text = self._shows_probe(PROBE)
        self.takes_parts = self._shows_probe([{"type": "text", "text": PROBE}])
        self.takes_tools = self._shows_tools()

    def render(self, prompt: ChatPrompt) -> str:
        """The text of the prompt, whose messages are those of `check_messages`.

        Raises InvalidRequest when the template refuses or cannot show them, or options contradict each other.
        """
        if reserved := OWN_VARIABLES & prompt.template_kwargs.keys():
            names = ", ".join(sorted(reserved))
            raise InvalidRequest(f"{names} cannot be set in chat_template_kwargs", "chat_template_kwargs")
        given, tools = prompt.messages, prompt.tools or ()
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in given)
        if not self.takes_tools and (tools or has_calls):
            given, prompt = in_plain_words(given, tools), replace(prompt, tools=None)
        messages = list(map(self._shown, given))
        if not prompt.continue_final_message:
            return self._render(messages, prompt, prompt.add_generation_prompt)
        if prompt.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other: set one of them to false",
                "continue_final_message",
            )
        return self._render_open(messages, prompt)

    def _render(self, messages: list[dict[str, Any]], prompt: ChatPrompt, add_generation_prompt: bool) -> str:
        variables = {"documents": None, **self._special_tokens, **prompt.template_kwargs}
        variables |= {"messages": messages, "tools": prompt.tools or None}
        try:
            return self._template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template cannot show these messages: {reason}", "messages") from error

    def _render_open(self, messages: list[dict[str, Any]], prompt: ChatPrompt) -> str:
        """Everything up to the end of the last message's text: a mark after it shows where that is.

        As in transformers, the mark ends in a space: if a template strips it, it also strips the message's own end.
        """
        if messages[-1]["role"] != "assistant":
            raise InvalidRequest("continue_final_message needs a last message of the assistant", "messages")
        holder, key = messages[-1], "content"
        if isinstance(holder["content"], list):
            holder, key = holder["content"][-1], "text"
        text = holder[key]
        holder[key] = f"{text}{END_MARK} "
        shown, mark, after = self._render(messages, prompt, add_generation_prompt=False).rpartition(END_MARK)
        if not mark or text.strip() not in shown:
            raise InvalidRequest("the chat template does not show the last message, so it cannot go on", "messages")
        return shown if after.startswith(" ") else shown.rstrip()

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """A copy in the form that the template takes."""
        role, content = message["role"], message["content"]
        if role == "developer" and not self._knows_developer:
            role = "system"
        if isinstance(content, str):
            if self.takes_parts and not self.takes_text:
                content = [{"type": "text", "text": content}]
        elif self.takes_parts:
            content = [dict(part) for part in content]
        else:
            content = "\n".join(part["text"] for part in content)
        return {**message, "role": role, "content": content}

    def _shows_probe(self, content: Any) -> bool:
        # A template that merely adds strings shows a list as Python writes it.
        try:
            prompt = ChatPrompt(messages=[])
            text = self._render([{"role": "user", "content": content}], prompt, add_generation_prompt=True)
        except InvalidRequest:
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text

    def _shows_tools(self) -> bool:
        message = self._shown({"role": "user", "content": ""})
        prompt = ChatPrompt(messages=[], tools=[{"type": "function", "function": PROBE_FUNCTION}])
        try:
            return PROBE in self._render([message], prompt, add_generation_prompt=True)
        except InvalidRequest:
            return False


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training; here it is as if it were not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)
