"""/v1/cache over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fakes import TREE
from tests.server.site import Site, error_of, user
from tokenmill.errors import InvalidRequest
from tokenmill.server.cache_routes import parse_cache_call
from tokenmill.wire.messages import CacheCall, CacheVerb, ChatPrompt

CACHE = "/v1/cache"


def test_questions_to_the_prefix_cache(site: Site) -> None:
    ids = list(map(ord, "abc"))
    assert site.request("GET", CACHE).json() == {"serial": 0, "verb": "stats", "token_ids": []}
    assert site.post(f"{CACHE}/probe", prompt="abc").json() == {"serial": 0, "verb": "probe", "token_ids": ids}
    pin = site.post(f"{CACHE}/pin", messages=user("abc"), cache_salt="s", ttl=2.5).json()
    assert pin == {"serial": 0, "verb": "pin", "token_ids": ids, "salt": "s", "ttl": 2500}
    assert site.post(f"{CACHE}/unpin", prompt=ids).json()["token_ids"] == ids
    assert site.post(f"{CACHE}/flush", with_pins=True).json()["with_pins"] is True
    assert site.request("POST", f"{CACHE}/flush").json()["verb"] == "flush", "also without a body"
    assert site.request("GET", f"{CACHE}/tree?max_nodes=5").json() == TREE
    text = site.request("GET", f"{CACHE}/tree?format=text")
    assert text.headers["content-type"].startswith("text/plain")
    assert text.text.splitlines()[1:] == ["salt (none)", "  ... 2 more"]
    paths = site.request("GET", "/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith(CACHE)} == {
        CACHE,
        *(f"{CACHE}/{verb}" for verb in ("probe", "pin", "unpin", "flush", "tree")),
    }
    assert "ttl" in paths[f"{CACHE}/pin"]["post"]["requestBody"]["content"]["application/json"]["schema"]["required"]


@pytest.mark.parametrize(
    ("verb", "fields", "param"),
    [
        ("probe", {"prompt": "REFUSE"}, "prompt"),
        ("probe", {"prompt": ["a", "b"]}, "prompt"),
        ("pin", {"prompt": "a"}, "ttl"),
        ("unpin", {"prompt": "a", "ttl": 1}, "ttl"),
        ("flush", {"cache_salt": 1}, "cache_salt"),
        ("flush", {"prompt": "a"}, "prompt"),
    ],
)
def test_bad_questions_to_the_prefix_cache(site: Site, verb: str, fields: dict[str, Any], param: str) -> None:
    response = site.post(f"{CACHE}/{verb}", **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.parametrize("query", ["max_nodes=0", "max_nodes=x", "max_depth=65", "format=xml", "nodes=5"])
def test_bad_queries_for_the_tree(site: Site, query: str) -> None:
    response = site.request("GET", f"{CACHE}/tree?{query}")
    assert (response.status_code, error_of(response)["param"]) == (400, query.partition("=")[0])


def test_what_the_prefix_cache_is_asked() -> None:
    salted = CacheCall(verb="probe", salt="s")
    assert parse_cache_call({"prompt": [1, 2], "cache_salt": "s"}, "probe") == (salted, [1, 2])
    pin = parse_cache_call({"messages": user("Hi"), "add_generation_prompt": False, "ttl": 0.5}, "pin")
    assert pin == (CacheCall(verb="pin", ttl=500), ChatPrompt(messages=user("Hi"), add_generation_prompt=False))
    assert parse_cache_call({}, "flush") == (CacheCall(verb="flush"), None)
    flush = CacheCall(verb="flush", salt="s", with_pins=True)
    assert parse_cache_call({"cache_salt": "s", "with_pins": True}, "flush") == (flush, None)


@pytest.mark.parametrize(
    ("fields", "verb", "param"),
    [
        ({}, "probe", "prompt"),
        ({"prompt": ["a", "b"]}, "probe", "prompt"),
        ({"prompt": "a", "messages": user("Hi")}, "probe", "prompt"),
        ({"prompt": "a", "ttl": 5}, "probe", "ttl"),
        ({"prompt": "a"}, "pin", "ttl"),
        ({"prompt": "a", "ttl": 0}, "pin", "ttl"),
        ({"prompt": "a", "ttl": 10**8}, "pin", "ttl"),
        ({"prompt": "a", "cache_salt": ""}, "probe", "cache_salt"),
        ({"prompt": "a", "max_tokens": 5}, "probe", "max_tokens"),
    ],
)
def test_wrong_questions_to_the_prefix_cache(fields: dict[str, Any], verb: CacheVerb, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_cache_call(fields, verb)
    assert caught.value.param == param
    assert param in caught.value.message
