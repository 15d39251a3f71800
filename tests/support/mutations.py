"""Bodies that are right, and what comes of them when one thing or several are changed by a seeded chance."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Edit = Callable[[random.Random, Json], None]

MARK = "\0raw:"  # begins a string that stands for JSON text of any kind
CITY: Json = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": CITY,
    },
}
CALL: Json = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOL_CHAT = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
SCHEMA: Json = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SAMPLING: Json = {
    "max_tokens": 4,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "seed": 3,
    "n": 2,
    "stop": ["zz", "y"],
    "stop_token_ids": [9],
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [5, 6, 7, 8],
    "bad_words": ["bad", [7, 8]],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "user": "me",
    "cache_salt": "salt",
    "deadline_ms": 20000,
    "timings": True,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
RESPONSES_TOOL: Json = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}
MESSAGES_TOOL: Json = {"name": "weather", "description": "tells the weather", "input_schema": CITY}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
SHORT: Json = {"max_tokens": 3, "temperature": 0}
STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
SEEDS: Mapping[str, list[Json]] = {
    "/v1/chat/completions": [
        {"messages": CHAT, **SAMPLING, "logprobs": True, "top_logprobs": 2},
        {"messages": CHAT, **SHORT, **STREAM, "n": 3},
        {"messages": TOOL_CHAT, **SHORT, "tools": [WEATHER], "tool_choice": "auto"},
        {"messages": CHAT, "max_tokens": 9, "response_format": FORMAT},
        {"messages": CHAT, "max_tokens": 9, "structured_outputs": {"regex": "[a-c]{2,4}"}, **STREAM},
        {"messages": TOOL_CHAT[:3], **SHORT, "add_generation_prompt": False, "chat_template_kwargs": {"a": [1]}},
    ],
    "/v1/completions": [
        {"prompt": "Once upon", **SAMPLING, "logprobs": 2},
        {"prompt": ["a", "b"], **SHORT, **STREAM, "echo": True},
        {"prompt": [[5, 6], [7, 8, 9]], **SHORT, "prompt_logprobs": 1},
        {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": 0},
        {"prompt": [5, 6, 7], "max_tokens": 8, "structured_outputs": {"grammar": 'start: "a" | "b" start'}},
    ],
    "/v1/responses": [
        {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 16, "temperature": 0.5, "user": "me"},
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "max_output_tokens": 16,
            "stream": True,
        },
        {"input": "Hi", "max_output_tokens": 16, "tools": [RESPONSES_TOOL], "tool_choice": "required"},
        {
            "input": "Hi",
            "max_output_tokens": 16,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        },
    ],
    "/v1/messages": [
        {
            "messages": MESSAGES,
            "system": "Be brief.",
            "max_tokens": 4,
            "temperature": 0.5,
            "top_k": 3,
            "stop_sequences": ["x"],
        },
        {"messages": MESSAGES, "max_tokens": 4, "stream": True, "metadata": {"user_id": "me"}},
        {
            "messages": MESSAGES,
            "max_tokens": 16,
            "tools": [MESSAGES_TOOL],
            "tool_choice": {"type": "any"},
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": MESSAGES, "system": "Be brief.", "tools": [MESSAGES_TOOL]}],
    "/v1/embeddings": [
        {"input": "a text", "encoding_format": "base64", "dimensions": 8},
        {"input": ["a", "b"], "user": "me", "timings": True},
        {"input": [[5, 6], [7]], "cache_salt": "s", "deadline_ms": 20000},
    ],
    "/tokenize": [
        {"prompt": "a text", "add_special_tokens": True, "return_token_strs": True},
        {"messages": TOOL_CHAT, "tools": [WEATHER], "add_generation_prompt": True},
    ],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/v1/cache/probe": [{"prompt": "Once upon", "cache_salt": "salt"}, {"messages": CHAT, "tools": [WEATHER]}],
    "/v1/cache/pin": [{"prompt": "Once upon a time", "ttl": 0.5}],
    "/v1/cache/unpin": [{"prompt": [5, 6, 7]}],
    "/v1/cache/flush": [{"cache_salt": "salt", "with_pins": True}],
    "/v1/requests/{request_id}/cancel": [{}],
}
RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "0.1e-400",
    "9" * 5000,
    "-0",
    "00",
    "1.",
    "tru",
    "'a'",
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\u0000\\u001f"',
    '"\\x41"',
    '"\t"',
    "[" * 3000 + "]" * 3000,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" * 100_000,
    "",
    "/*c*/1",
    "[1,]",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 2**31 - 1, 2**31, 2**32, -(2**31)),
    *(2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**100, 260, 259, 20, 21, 128, 129),
    *("", " ", "a", "null", "0", "auto", "required", "none", "text", "json_object", "\0", "\ufeff", "\u2028"),
    *("\U0010ffff", "e\u0301", "\u202e", "ｆ", "🏳️‍🌈", "<|im_end|>", "{{ 7*7 }}", "../..", "a\r\nb: c", "%s%n"),
    *([], {}, [[]], [None], [{}], [""], [0], [[0]], ["a", 1], [[1], 2], {"": 1}, {"type": "text"}, {"a": {}}),
    *({"type": "function"}, {"$ref": "#"}, {"type": "object"}, {"json": {"$ref": "#/a"}}, {"regex": "("}),
    *({"regex": "(a{1,9999}){1,9999}"}, {"grammar": "start: start start"}, {"choice": [""]}, {"json": ""}),
    "x" * 70_000,
    "é" * 300,
    "\U0001f600" * 2000,
    [0] * 100_000,
    ["a"] * 1025,
    [5] * 600,
    [{}] * 2000,
    {str(key): 0 for key in range(3000)},
    {"k" * 50_000: 1},
)
CONTENT_TYPES = ("text/plain", "", "application/xml", "application/json; charset=utf-16", "multipart/form-data", "json")
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-request-id", b""),
    (b"x-request-id", b"a" * 256),
    (b"x-request-id", b"a" * 257),
    (b"x-request-id", b"\xff\xfe"),
    (b"x-request-id", b"a\tb"),
    (b"accept", b"text/event-stream"),
    (b"accept", b"*/*;q=2, \xff"),
    (b"accept-encoding", b"br, gzip;q=nan"),
    (b"authorization", b"Bearer \xe9"),
    (b"x-api-key", b"'; drop"),
    (b"origin", b"null"),
    (b"expect", b"100-continue"),
    (b"content-encoding", b"gzip"),
    (b"cookie", b"=" * 3000),
    (b"x-forwarded-for", b"::ffff:0/0"),
    (b"range", b"bytes=5-1"),
    (b"te", b"trailers"),
)


MOST = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"


@dataclass
class Shot:
    """A request that may be wrong in any way."""

    path: str
    body: bytes
    method: str = "POST"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


def shots(seed: int, count: int) -> Iterator[Shot]:
    """`count` requests that depend on `seed` alone."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice([*SEEDS, *MOST * 3])
        body = copy.deepcopy(chance.choice(SEEDS[path]))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            chance.choice(EDITS)(chance, body)
        shot = Shot(path.replace("{request_id}", chance.choice(("x", "a/b", "%00", "é" * 50))), _encode(body))
        if chance.random() < 0.1:
            shot.body = _torn(chance, shot.body)
        kind = chance.choice(CONTENT_TYPES) if chance.random() < 0.04 else "application/json"
        shot.headers = [(b"content-type", kind.encode())]
        if chance.random() < 0.1:
            shot.headers.append(chance.choice(HEADERS))
        if chance.random() < 0.02:
            shot.method = chance.choice(("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"))
        yield shot


def _raw(text: str) -> str:
    """A string that `_encode` turns into this text."""
    return MARK + text.encode("utf-8", "surrogatepass").hex()


def _encode(body: Json) -> bytes:
    """JSON with what stands for itself put in, and surrogates as they come."""
    first, *parts = json.dumps(body, ensure_ascii=False).split(json.dumps(MARK)[:-1])
    pieces = [first.encode("utf-8", "surrogatepass")]
    for part in parts:
        raw, _, rest = part.partition('"')
        pieces += [bytes.fromhex(raw), rest.encode("utf-8", "surrogatepass")]
    return b"".join(pieces)


def _torn(chance: random.Random, body: bytes) -> bytes:
    """Bytes that are cut, changed, doubled or said to be something else."""
    place = chance.randrange(len(body) + 1)
    return chance.choice(
        (
            body[:place],
            body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :],
            body[:place]
            + chance.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\0", b'"', b"{", b"\\"))
            + body[place:],
            body + body,
            b"\xef\xbb\xbf" + body,
            body.decode("utf-8", "replace").encode("utf-16"),
            b"[" + body + b"]",
            b"",
            b" " * 5000 + body,
        )
    )


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _place(chance: random.Random, body: Json) -> tuple[Any, Any]:
    places = list(_places(body))
    return chance.choice(places[:500]) if places else (body, "prompt")


def _value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(VALUES)) if chance.random() < 0.8 else _raw(chance.choice(RAW))


def _replace(chance: random.Random, body: Json) -> None:
    node, key = _place(chance, body)
    node[key] = _value(chance)


def _nudge(chance: random.Random, body: Json) -> None:
    """Another value of the same type."""
    node, key = _place(chance, body)
    match node.get(key) if isinstance(node, dict) else node[key]:
        case bool() as flag:
            node[key] = not flag
        case int() | float() as number:
            node[key] = chance.choice((number + 1, number - 1, number * 2, number + 0.5, float(number), 0, -number))
        case str() as text if not text.startswith(MARK):
            node[key] = chance.choice((text * 2, text[1:], text[::-1], text + "\u00e9", text.upper(), "."))
        case list() as items:
            node[key] = chance.choice((items * 2, items[1:], items[::-1]))


def _drop(chance: random.Random, body: Json) -> None:
    node, key = _place(chance, body)
    if isinstance(node, list) or key in node:
        del node[key]


def _wrap(chance: random.Random, body: Json) -> None:
    """A value becomes a list of it, an object, its text, or several of it."""
    node, key = _place(chance, body)
    value = node.get(key) if isinstance(node, dict) else node[key]
    shapes: tuple[Callable[[], Any], ...] = (
        lambda: [value],
        lambda: {"value": value},
        lambda: json.dumps(value),
        lambda: [value] * 130,
    )
    node[key] = chance.choice(shapes)()


def _swap(chance: random.Random, body: Json) -> None:
    """Two values change places."""
    (node, key), (other, name) = _place(chance, body), _place(chance, body)
    if (isinstance(node, list) or key in node) and (isinstance(other, list) or name in other):
        first, second = copy.deepcopy(node[key]), copy.deepcopy(other[name])
        node[key] = second
        if not isinstance(other, list) or name < len(other):
            other[name] = first


def _add(chance: random.Random, body: Json) -> None:
    """A field of another body, or one that nobody knows, in any object."""
    node = chance.choice([body, body, *(node for node, _ in _places(body) if isinstance(node, dict))][:200])
    donor = chance.choice(SEEDS[chance.choice(list(SEEDS))])
    name = chance.choice([*donor, "unknown", "", "__class__", "x" * 300, "\ud83d"])
    node[name] = copy.deepcopy(donor[name]) if name in donor and chance.random() < 0.7 else _value(chance)


def _double(chance: random.Random, body: Json) -> None:
    """A key twice, the second time with another value."""
    name = chance.choice([*body, "prompt"])
    body[name] = _raw(f"1,{json.dumps(name)}:{json.dumps(chance.choice((None, 1, 'a', [], True)))}")


EDITS: tuple[Edit, ...] = (_replace, _replace, *[_nudge] * 5, _drop, _drop, _wrap, _swap, _add, _add, _double)
