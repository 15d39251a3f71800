"""/v1/cache: the prefix cache, as a tool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tokenmill.errors import InvalidRequest
from tokenmill.sched.dump import as_text
from tokenmill.schema import TEXT, Table, one_of, whole
from tokenmill.server.apis import answers_of, described
from tokenmill.server.client import EngineClient
from tokenmill.server.errors import json_response
from tokenmill.server.fields import FLUSH, PIN, PROBE
from tokenmill.server.protocol import Fields, Prompt, prompts_of, template_prompt
from tokenmill.wire.messages import CacheCall, CacheVerb

Reader = Callable[..., Awaitable[tuple[Any, int]]]
MAX_NODES, MAX_DEPTH = 10_000, 64
PROBE_EXAMPLE = {"prompt": "The sun is"}
PIN_EXAMPLE = {"messages": [{"role": "system", "content": "Be brief."}], "add_generation_prompt": False, "ttl": 600}
TREE_QUERY = {
    "responses": {"200": {"content": {"text/plain": {"schema": TEXT}}}},
    "parameters": [
        {"name": name, "in": "query", "schema": kind}
        for name, kind in (
            ("format", one_of("json", "text")),
            ("max_nodes", whole(1, MAX_NODES)),
            ("max_depth", whole(1, MAX_DEPTH)),
        )
    ],
}
VERBS: Mapping[CacheVerb, tuple[str, Table, dict[str, Any]]] = {
    "probe": ("What a prompt would find", PROBE, PROBE_EXAMPLE),
    "pin": ("Keep what is known of a prompt for some time", PIN, PIN_EXAMPLE),
    "unpin": ("End the pin of a prompt's longest pinned prefix", PROBE, PROBE_EXAMPLE),
    "flush": ("Forget what no request uses", FLUSH, {}),
}


def add_cache_routes(router: APIRouter, client: EngineClient, read: Reader, timeout: float) -> None:
    """Routes that ask the scheduler, between steps, within `timeout` seconds.

    `read` gives what a function makes of a request's body, and the body's size.
    """

    async def ask(verb: CacheVerb, request: Request) -> Response:
        (call, prompt), size = await read(request, parse_cache_call, verb)
        return json_response(await client.ask(call, timeout, prompt, size))

    @router.get("/v1/cache", responses=answers_of(), summary="Pages by owner, hits, evictions")
    async def stats() -> Response:
        return json_response(await client.ask(CacheCall(verb="stats"), timeout))

    @router.get("/v1/cache/tree", responses=answers_of(), openapi_extra=TREE_QUERY, summary="The prefix tree")
    async def tree(request: Request) -> Response:
        query = dict(request.query_params)
        max_nodes, max_depth = _number(query, "max_nodes", 1000, MAX_NODES), _number(query, "max_depth", 32, MAX_DEPTH)
        form = query.pop("format", "json")
        if form not in ("json", "text") or query:
            wrong = next(iter(query), "format")
            raise InvalidRequest(f"{wrong[:80]}: the query takes format=json|text, max_nodes, max_depth", wrong[:80])
        call = CacheCall(verb="tree", max_nodes=max_nodes, max_depth=max_depth)
        data = await client.ask(call, timeout)
        return PlainTextResponse(as_text(data)) if form == "text" else json_response(data)

    for verb, (summary, table, example) in VERBS.items():
        router.post(f"/v1/cache/{verb}", openapi_extra=described(table, example), summary=summary)(partial(ask, verb))


def parse_cache_call(body: dict[str, Any], verb: CacheVerb) -> tuple[CacheCall, Prompt | None]:
    """What is asked of the prefix cache, about one prompt or messages unless it is to flush. Raises as `parse_chat`."""
    fields = Fields(body, VERBS[verb][1])
    salt, prompt, ttl = fields.take("cache_salt"), None, 0.0
    if verb != "flush":
        prompts: list[Prompt] = [template_prompt(fields)] if "messages" in body else prompts_of(fields.raw("prompt"))
        if len(prompts) != 1:
            raise InvalidRequest("prompt must be a single one: send several requests", "prompt")
        prompt = prompts[0]
    if verb == "pin":
        ttl = fields.take("ttl")
    with_pins = verb == "flush" and fields.take("with_pins") is True
    fields.refuse_rest()
    return CacheCall(verb=verb, salt=salt, ttl=round(1000 * ttl), with_pins=with_pins), prompt


def _number(query: dict[str, str], name: str, default: int, most: int) -> int:
    given = query.pop(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {most}", name)
    return int(given)
