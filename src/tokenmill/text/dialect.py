"""How a model writes tool calls and thoughts: told by its chat template, or by flags."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Tags(msgspec.Struct, frozen=True):
    """What stands before and after."""

    start: str
    end: str


class ToolStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written: as objects with a name and arguments.

    Args:
        tags: before and after each call; without an end, the start is written once, before the first call.
        is_bare: a call may begin, without a tag, where the output does.
        in_list: calls are the items of one JSON list.
        inside: what the model writes between a tag and a call.
        between: what it writes between two calls.
        arguments: the key of the arguments.
        id_letters: how long a call's id is, where templates insist on it.
        template_has: by what a template shows that its model writes so.
    """

    tags: Tags = Tags("", "")
    is_bare: bool = False
    in_list: bool = False
    inside: str = ""
    between: str = ""
    arguments: str = "arguments"
    id_letters: int = 24
    template_has: str = ""


TOOL_STYLES: Mapping[str, ToolStyle] = {
    "hermes": ToolStyle(
        tags=Tags("<tool_call>", "</tool_call>"), inside="\n", between="\n", template_has="<tool_call>"
    ),
    "mistral": ToolStyle(
        tags=Tags("[TOOL_CALLS]", ""), in_list=True, between=", ", id_letters=9, template_has="[TOOL_CALLS]"
    ),
    "llama3_json": ToolStyle(
        tags=Tags("<|python_tag|>", ""), is_bare=True, between="; ", arguments="parameters", template_has="ipython"
    ),
    "json": ToolStyle(is_bare=True, between="\n"),
}
THOUGHTS: Mapping[str, Tags] = {"think": Tags("<think>", "</think>"), "mistral": Tags("[THINK]", "[/THINK]")}


VARIABLES = "reasoning_effort", "enable_thinking"


class Dialect(msgspec.Struct, frozen=True):
    """Names in TOOL_STYLES and THOUGHTS; `reasoning` is None where a model does not think aloud.

    `special` has the ids of those tags that are special tokens: text for people leaves them out. `variables` are those
    of VARIABLES that the template looks at.
    """

    tools: str = "json"
    reasoning: str | None = None
    special: dict[str, int] = {}
    variables: list[str] = []

    @property
    def style(self) -> ToolStyle:
        """How calls are written."""
        return TOOL_STYLES[self.tools]

    @property
    def thoughts(self) -> Tags | None:
        """What stands around thoughts."""
        return None if self.reasoning is None else THOUGHTS[self.reasoning]


def find_dialect(source: str, special: Mapping[str, int], tools: str = "auto", reasoning: str = "auto") -> Dialect:
    """What the flags say, or else what a template's source shows; `special` are the ids of all special tokens."""
    if tools == "auto":
        found = (name for name, style in TOOL_STYLES.items() if style.template_has and style.template_has in source)
        tools = next(found, "json")
    if reasoning == "auto":
        reasoning = next((name for name, tags in THOUGHTS.items() if tags.end in source), "none")
    dialect = Dialect(tools, None if reasoning == "none" else reasoning)
    tags = [dialect.style.tags] + ([] if dialect.thoughts is None else [dialect.thoughts])
    ids = {text: special[text] for pair in tags for text in (pair.start, pair.end) if text in special}
    return msgspec.structs.replace(dialect, special=ids, variables=[name for name in VARIABLES if name in source])
