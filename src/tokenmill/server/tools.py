"""What a request says of tools: which are shown, which may be called, and the grammar where calls must be right.

A grammar is needed where a call is asked for, a tool is strict, or only one call may come. It is llguidance's notation
of Lark's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.text.dialect import Dialect
from tokenmill.types import StructuredOutputs

ANYTHING = r"/(?s:.*)/"
NOT_JSON = r"/[^{\[\s](?s:.*)/"
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, as templates show them; the parameters of those that may be called; any grammar."""

    shown: Sequence[Json] = ()
    callable: Mapping[str, Json] = field(default_factory=dict)
    grammar: str | None = None


def tool_use(
    dialect: Dialect,
    tools: Sequence[Json],
    choice: Any,
    *,
    is_parallel: bool = True,
    answer: StructuredOutputs | None = None,
) -> ToolUse:
    """What checked fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat ask for.

    `answer` is what the output must be where nothing is called. A tool that is named is called once. With choice "none"
    no tool is shown: what a model does not know it does not call. Raises InvalidRequest where they do not go together.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if len(functions) < len(tools):
        raise InvalidRequest("tools has two tools of one name", "tools")
    mode, names = _chosen(choice, list(functions))
    is_parallel = is_parallel and not (isinstance(choice, dict) and choice["type"] == "function")
    if mode == "required" and not names:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
    for name in names:
        if name not in functions:
            raise InvalidRequest(f"tool_choice names the tool {name[:80]!r}, which is not in tools", "tool_choice")
    if mode == "none" or not functions:
        return ToolUse()
    if answer is not None and answer.json is None and not answer.json_object:
        raise InvalidRequest(f"{answer.param} beside tools can only ask for JSON", answer.param)
    allowed = {name: functions[name] for name in names}
    is_strict = any(function.get("strict") for function in allowed.values())
    needs_grammar = allowed and (mode == "required" or is_strict or not is_parallel or answer is not None)
    grammar = _grammar(dialect, allowed, mode == "required", is_parallel, answer) if needs_grammar else None
    return ToolUse([*tools], {name: function.get("parameters") or {} for name, function in allowed.items()}, grammar)


def _chosen(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """The mode, one of none, auto and required, and the names of the tools that may be called."""
    if choice is None or isinstance(choice, str):
        return choice or "auto", names
    if choice["type"] == "function":
        return "required", [choice["function"]["name"]]
    allowed = choice["allowed_tools"]
    return allowed["mode"], [tool["function"]["name"] for tool in allowed["tools"]]


def _grammar(
    dialect: Dialect,
    functions: Mapping[str, Json],
    is_required: bool,
    is_parallel: bool,
    answer: StructuredOutputs | None,
) -> str:
    style = dialect.style
    start, end = (_literal(dialect, tag) for tag in (style.tags.start, style.tags.end))
    between, inside = json.dumps(style.between), json.dumps(style.inside)
    rules = {"call": " | ".join(f"call{index}" for index in range(len(functions)))}
    if style.tags.end:
        rules["one"], more = f"{start} {inside} call {inside} {end}", f"{between} one"
    else:
        rules["one"], more = "call", f"{between} call"
    calls = f"one ({more})*" if is_parallel else "one"
    if style.in_list:
        calls = f'{start} "[" {calls} "]"'
    if is_required:
        rules["start"] = calls
    elif answer is not None:
        schema = json.loads(answer.json) if isinstance(answer.json, str) else answer.json
        rules |= {"start": f"{calls} | answer"}
        rules["answer"] = _schema({"type": "object"} if answer.json_object else schema, answer.strict)
    elif style.is_bare:
        rules |= {"start": f"{calls} | TEXT | ", "TEXT": NOT_JSON}
    else:
        # A tag within text begins a call: a lazy rule ends as soon as it can.
        is_special = style.tags.start in dialect.special
        begins = "TEXT " + start
        rules |= {"TEXT": ANYTHING, "begins" if is_special else "begins[lazy]": begins}
        rest = calls.removeprefix(start) if style.in_list else f"{inside} call {inside} {end}"
        rules["tagged"] = f"begins {rest}"
        rules["start"] = "tagged* TEXT" if is_parallel and not style.in_list else "tagged | TEXT"
    for index, (name, function) in enumerate(functions.items()):
        schema = function.get("parameters") or NO_PARAMETERS
        if not (is_required or function.get("strict")):
            schema = {"type": "object"}
        head, key = json.dumps(f'{{"name": {json.dumps(name)}, '), json.dumps(f'"{style.arguments}": ')
        rules[f"call{index}"] = f'{head} {key} arguments{index} "}}"'
        rules[f"arguments{index}"] = _schema(schema, bool(function.get("strict")))
    return "\n".join(f"{name}: {rule}" for name, rule in sorted(rules.items(), key=lambda rule: rule[0] != "start"))


def _literal(dialect: Dialect, tag: str) -> str:
    return f"<[{dialect.special[tag]}]>" if tag in dialect.special else json.dumps(tag)


def _schema(schema: Any, is_strict: bool) -> str:
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        options = SPACING | {"lenient": not is_strict}
        schema = schema | {"x-guidance": options | own if isinstance(own, dict) else own}
    return "%json " + json.dumps(schema)
