"""/tokenize and /detokenize over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.site import Site, error_of, user


def test_questions_to_a_tokenizer(site: Site) -> None:
    plain = site.post("/tokenize", model="org/tiny", prompt="abc").json()
    assert plain == {"text": "abc", "count": 3, "special": True, "strings": False}
    chosen = site.post("/tokenize", prompt="", add_special_tokens=False, return_token_strs=True).json()
    assert chosen == {"text": "", "count": 0, "special": False, "strings": True}
    assert site.post("/tokenize", messages=user("abc"), add_generation_prompt=False).json()["text"] == "abc"
    assert site.post("/detokenize", tokens=[ord("h"), ord("i")]).json() == {"prompt": "hi"}
    assert site.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    paths = site.request("GET", "/openapi.json").json()["paths"]
    schema = paths["/detokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": user("a")}, 400, "prompt"),
        ("/tokenize", {"messages": user("a"), "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "x": 1}, 400, "x"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
def test_bad_questions(site: Site, path: str, fields: dict[str, Any], status: int, param: str) -> None:
    response = site.post(path, **fields)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
