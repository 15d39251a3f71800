"""What users ask of the prefix cache."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.sched.cache import PrefixCache
from tokenmill.wire.messages import CacheCall, CallAnswer, error_info


def answer_call(cache: PrefixCache, call: CacheCall, now: int) -> CallAnswer:
    """The answer to `call` at time `now`, in milliseconds. Counts are of tokens where nothing else is said."""
    cache.expire(now)
    try:
        return CallAnswer(call.serial, _answer(cache, call, now))
    except TokenmillError as error:
        return CallAnswer(call.serial, error=error_info(error))


def _answer(cache: PrefixCache, call: CacheCall, now: int) -> dict[str, Any]:
    match call.verb:
        case "stats":
            return _stats(cache)
        case "tree":
            return cache.dump(max_nodes=call.max_nodes, max_depth=call.max_depth) | {"now": now}
        case "flush":
            return {"freed_pages": cache.flush(call.salt, with_pins=call.with_pins)}
    ids, salt = call.token_ids or b"", call.salt or ""
    if call.verb == "unpin":
        return {"unpinned_tokens": cache.unpin(ids, salt)}
    pinned = {}
    if call.verb == "pin":
        if not cache.is_enabled:
            raise InvalidRequest("the prefix cache is off: start the server without --no-prefix-cache")
        pinned = {"expires_in_ms": call.ttl} if cache.pin(ids, salt, now + call.ttl) else {}
    probe = {f"{name}_tokens": count for name, count in dataclasses.asdict(cache.probe(ids, salt)).items()}
    return {"prompt_tokens": len(ids) // 4} | probe | pinned


def _stats(cache: PrefixCache) -> dict[str, Any]:
    counters = dataclasses.asdict(cache.counters)
    return {
        "is_enabled": cache.is_enabled,
        "page_size": cache.page_size,
        "num_pages": cache.num_pages,
        "pages": cache.pages_by_owner(),
        "num_pins": cache.num_pins,
        "hit_rate": counters["hit_tokens"] / max(1, counters["lookup_tokens"]),
        **counters,
    }
