"""A model that says what it is told, in a dialect of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tests.server.site import SETTINGS, Site
from tokenmill.server.app import create_app
from tokenmill.text.dialect import TOOL_STYLES, Dialect

GOOD = {"name": "add", "arguments": {"a": 1, "b": 2}}
OTHER = {"name": "ping", "arguments": {}}


def written(style: str, *calls: dict[str, Any]) -> str:
    """The calls as a model would write them."""
    its = TOOL_STYLES[style]
    texts = [json.dumps({"name": call["name"], its.arguments: call["arguments"]}) for call in calls]
    if its.tags.end:
        texts = [f"{its.tags.start}{its.inside}{text}{its.inside}{its.tags.end}" for text in texts]
    whole = its.between.join(texts)
    return f"{its.tags.start}[{whole}]" if its.in_list else whole


SAID = f"<think>Hm</think>\nLet me see\n{written('hermes', GOOD, OTHER)}."


class Speaking(Site):
    """Its output is the last message's text, up to a full stop."""

    def __init__(self, dialect: Dialect = Dialect("hermes", "think")) -> None:  # noqa: B008
        super().__init__()
        self.app = create_app(self.engine.client, replace(SETTINGS, dialect=dialect))

    def answer(self, path: str, **fields: Any) -> dict[str, Any]:
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The stream's events; asserts that each that has a name has its type as that."""
        events = []
        *blocks, rest = self.post(path, stream=True, **fields).text.split("\n\n")
        assert rest == ""
        for block in blocks:
            name, _, data = block.rpartition("data: ")
            if data != "[DONE]":
                events.append(json.loads(data))
                assert name in ("", f"event: {events[-1].get('type')}\n")
        return events
