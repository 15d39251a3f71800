"""Pieces of an answer, and thoughts read out of a model's text as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.text.dialect import Tags

Kind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(slots=True)
class Part:
    """A piece of an answer. `text` is a call's name in the part that opens it; `index` counts calls."""

    kind: Kind
    text: str
    index: int = 0


class ThoughtReader:
    """Splits off the thoughts at the beginning, without space at their borders. The prompt may have begun them."""

    def __init__(self, tags: Tags, is_thinking: bool) -> None:
        self._tags = tags
        self._state = "inside" if is_thinking else "before"
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """What is certain."""
        parts: list[Part] = []
        self._held += text
        if self._state == "before":
            bare = self._held.lstrip()
            if bare.startswith(self._tags.start):
                self._state, self._held = "inside", bare[len(self._tags.start) :]
            elif not self._tags.start.startswith(bare):
                self._state = "after"
        if self._state in ("inside", "thinking"):
            thought, tag, rest = self._held.partition(self._tags.end)
            shown = thought.rstrip() if tag else _certain(thought, self._tags.end)
            self._held = rest if tag else thought[len(shown) :]
            if self._state == "inside":
                shown = shown.lstrip()
                self._state = "thinking" if shown else "inside"
            parts += [Part("reasoning", shown)] if shown else []
            self._state = "between" if tag else self._state
        if self._state == "between":
            self._held = self._held.lstrip()
            self._state = "after" if self._held else "between"
        if self._state == "after" and self._held:
            parts.append(Part("content", self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """What was held back."""
        held, self._held = self._held, ""
        kind: Kind = "reasoning" if self._state in ("inside", "thinking") else "content"
        return [Part(kind, held)] if held else []


def _certain(text: str, tag: str) -> str:
    """The text without what may belong to the tag or be space before it."""
    length = next((size for size in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - length].rstrip()
