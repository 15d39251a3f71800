"""Text of a model, as it comes, to thoughts, content and tool calls.

Letters go one by one through a generator that reads as if it had them all. What may be a call is held back until its
name is known and its arguments begin; if it turns out to be none, it is content. From there on arguments are handed on
as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from tokenmill.server.parts import Kind, Part, ThoughtReader
from tokenmill.text.dialect import Dialect, ToolStyle

MAX_NAME = 256
SPACE = " \t\r\n"
ENDS = ",]}" + SPACE  # of a value without quotes or brackets
ARGUMENTS = ("arguments", "parameters")
ARGS_MARK = "[ARGS]"

Letters = Generator[None, str, str]
Json = dict[str, Any]


class _Broken(Exception):
    """What began like a call is none."""


class ToolReader:
    """Splits off calls of tools, whose parameters are JSON schemas.

    `_held` is what will be content if that which is being read turns out to be no call; `_blank` is space after
    content, shown when more content follows and dropped when a call does.
    """

    def __init__(self, style: ToolStyle, tools: Mapping[str, Json]) -> None:
        self._style = style
        self._tools = tools
        self._parts: list[Part] = []
        self._blank = self._held = ""
        self._back = ""  # a letter that was read too far
        self._at_start = self._in_text = True
        self._num_calls = 0
        self._name = ""
        self._arguments = ""  # those that came before the name
        self._is_open = self._copies = False
        self._machine = self._read()
        next(self._machine)

    def push(self, text: str) -> list[Part]:
        """What is certain."""
        tag, waits = self._style.tags.start[:1], bool(self._held or self._back)
        if self._in_text and not waits and not (self._style.is_bare and self._at_start) and not (tag and tag in text):
            self._content(text)
        else:
            for letter in text:
                self._machine.send(letter)
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """What was held back. A call that is cut is shown as far as it came."""
        self._content("" if self._is_open else self._held)
        if not self._num_calls:
            self._add("content", self._blank)
        self._held = self._blank = ""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, kind: Kind, text: str) -> None:
        if text and self._parts and self._parts[-1].kind == kind != "call":
            self._parts[-1].text += text
        elif text:
            self._parts.append(Part(kind, text, 0 if kind == "content" else self._num_calls - 1))

    def _content(self, text: str) -> None:
        text = self._blank + text
        shown = text.rstrip(SPACE)
        self._blank = text[len(shown) :]
        self._at_start = self._at_start and not shown
        self._add("content", shown)

    def _take(self) -> Letters:
        is_new = not self._back
        letter = (yield) if is_new else self._back
        self._back = ""
        if not (self._copies and self._is_open):
            self._held += letter
        if self._copies and is_new:
            self._argument(letter)
        return letter

    def _untake(self, letter: str) -> None:
        self._back = letter
        if not (self._copies and self._is_open):
            self._held = self._held[:-1]

    def _next(self) -> Letters:
        """The next letter that is no space."""
        while (letter := (yield from self._take())) in SPACE:
            pass
        return letter

    def _read(self) -> Letters:
        while True:
            self._in_text = True
            yield from self._text()
            self._in_text = False
            with suppress(_Broken):
                yield from self._calls()
            self._close()
            self._content(self._held)
            self._held = ""

    def _text(self) -> Letters:
        """Content, up to and with a tag, or up to where a call may begin without one."""
        tag = self._style.tags.start
        while True:
            letter = yield from self._take()
            if self._style.is_bare and self._at_start and self._held == letter and letter in "{[":
                self._untake(letter)
                return ""
            if tag and self._held == tag:
                return ""
            if not (tag and tag.startswith(self._held)):
                held, self._held = self._held, ""
                if len(held) > 1:  # the last letter may begin the tag
                    held, self._back = held[:-1], letter
                self._content(held)

    def _calls(self) -> Letters:
        """One call or several, with what ends them."""
        end = self._style.tags.end
        letter = yield from self._next()
        if letter == "[" and not end:
            while letter != "]":
                yield from self._call((yield from self._next()))
                if (letter := (yield from self._next())) not in ",]":
                    raise _Broken
            self._held = ""
            return ""
        while True:
            yield from self._call(letter)
            letter = yield from self._next()
            if end:
                tail = letter
                while tail != end:
                    if not end.startswith(tail):
                        raise _Broken
                    tail += yield from self._take()
                self._held = ""
                return ""
            if letter != ";":
                self._untake(letter)
                return ""
            letter = yield from self._next()

    def _call(self, letter: str) -> Letters:
        if letter == "{":
            yield from self._call_object()
        elif self._style.in_list:
            yield from self._named_call(letter)
        elif letter == "<" and self._style.tags.end:
            yield from self._tagged_call()
        else:
            raise _Broken
        self._arguments = self._arguments or "{}"
        self._open()
        self._held = ""
        return self._close()

    def _call_object(self) -> Letters:
        """{"name": ..., "arguments": {...}}, in any order and perhaps with more."""
        letter = ","
        while letter != "}":
            yield from self._expect('"')
            key = yield from self._string()
            yield from self._expect(":")
            letter = yield from self._next()
            if key == "name" and letter == '"':
                self._name = yield from self._string()
            elif key in ARGUMENTS:
                yield from self._call_arguments(letter)
            else:
                yield from self._value(letter)
            letter = yield from self._expect(",}")
        return ""

    def _named_call(self, head: str) -> Letters:
        """name[ARGS]{...} or name{...}: Mistral's newer way."""
        while head[-1] != "{" and len(head) < MAX_NAME:
            head += yield from self._take()
        self._name = head[:-1].removesuffix(ARGS_MARK).strip()
        return (yield from self._call_arguments(head[-1]))

    def _tagged_call(self) -> Letters:
        """<function=NAME>, <parameter=KEY>VALUE</parameter> for each, </function>: Qwen3-Coder's way."""
        head = yield from self._until(">")
        self._name = head.removeprefix("function=").strip()
        if head == self._name or self._name not in self._tools:
            raise _Broken
        values: Json = {}
        while (tag := (yield from self._until(">")).strip()) != "</function":
            key = tag.removeprefix("<parameter=")
            if key == tag:
                raise _Broken
            text = yield from self._until("</parameter>")
            values[key] = _typed(self._tools[self._name], key, text.removeprefix("\n").removesuffix("\n"))
        self._arguments = json.dumps(values, ensure_ascii=False)
        return ""

    def _until(self, mark: str) -> Letters:
        text = ""
        while not text.endswith(mark):
            text += yield from self._take()
        return text.removesuffix(mark)

    def _call_arguments(self, letter: str) -> Letters:
        if letter == '"':  # an object within a string
            self._arguments = yield from self._string()
        elif letter == "{":
            self._arguments = letter
        else:
            raise _Broken
        if self._name:
            self._open()
        if letter == "{":
            self._copies = True
            yield from self._value(letter)
            self._copies = False
        return ""

    def _open(self) -> None:
        """Announce the call, with the arguments so far: there is no way back."""
        if self._name not in self._tools:
            raise _Broken
        if not self._is_open:
            if self._arguments != "{" and not is_object(self._arguments):  # all of them, then
                raise _Broken
            self._num_calls += 1
            self._is_open, self._held, self._blank = True, "", ""
            self._add("call", self._name)
            self._add("arguments", self._arguments)

    def _close(self) -> str:
        self._is_open = self._copies = False
        self._name = self._arguments = ""
        return ""

    def _argument(self, letter: str) -> None:
        if self._is_open:
            self._add("arguments", letter)
        else:
            self._arguments += letter

    def _expect(self, letters: str) -> Letters:
        if (letter := (yield from self._next())) not in letters:
            raise _Broken
        return letter

    def _quoted(self) -> Letters:
        """A string whose first quote was taken, as it is written."""
        raw = '"'
        while True:
            letter = yield from self._take()
            raw += letter
            if letter == '"':
                return raw
            if letter == "\\":
                raw += yield from self._take()

    def _string(self) -> Letters:
        """The text of a string whose first quote was taken."""
        raw = yield from self._quoted()
        try:
            return str(json.loads(raw))
        except ValueError:
            raise _Broken from None

    def _value(self, letter: str) -> Letters:
        """One JSON value whose first letter was taken, as far as quotes and brackets tell."""
        if letter not in '"{[':
            while letter not in ENDS:
                letter = yield from self._take()
            self._untake(letter)
            return ""
        depth = 0
        while True:
            if letter == '"':
                yield from self._quoted()
            depth += (letter in "{[") - (letter in "}]")
            if not depth:
                return ""
            letter = yield from self._take()


class AnswerReader:
    """Text to thoughts, content, and calls of tools; see `ToolReader`."""

    def __init__(self, dialect: Dialect, tools: Mapping[str, Json], is_thinking: bool) -> None:
        self._thoughts = ThoughtReader(dialect.thoughts, is_thinking) if dialect.thoughts else None
        self._tools = ToolReader(dialect.style, tools) if tools else None

    def push(self, text: str) -> list[Part]:
        """What is certain."""
        return self._read_tools(self._thoughts.push(text) if self._thoughts else _content(text))

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = self._read_tools(self._thoughts.finish() if self._thoughts else [])
        return parts + self._tools.finish() if self._tools else parts

    def _read_tools(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        read = [self._tools.push(part.text) if part.kind == "content" else [part] for part in parts]
        return [part for each in read for part in each]


def read_whole(
    text: str, tools: Mapping[str, Json], reader: Callable[[Mapping[str, Json]], AnswerReader]
) -> list[Part]:
    """A whole text, where a call whose arguments are cut or broken is content: then nothing in it is a call."""
    read = reader(tools)
    parts = read.push(text) + read.finish()
    arguments = {part.index: "" for part in parts if part.kind == "call"}
    for part in parts:
        if part.kind == "arguments":
            arguments[part.index] += part.text
    return parts if all(map(is_object, arguments.values())) else read_whole(text, {}, reader)


def _content(text: str) -> list[Part]:
    return [Part("content", text)] if text else []


def _typed(schema: Json, key: str, text: str) -> Any:
    """A value that was written without quotes: JSON, unless it is to be a string, or can only be one."""
    properties = schema.get("properties")
    its = properties.get(key) if isinstance(properties, dict) else None
    kind = its.get("type") if isinstance(its, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind and text != "null"):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def is_object(text: str) -> bool:
    """Whether the text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
