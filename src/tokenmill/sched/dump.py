"""What is known and counted of prefixes; their tree as data and as text, for people.

Bounded: the levels nearest to the root come first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.sched.radix import TOKEN_BYTES, Node, Root

FIRST_IDS = 8


@dataclass(frozen=True, slots=True)
class Probe:
    """What the tree knows of some tokens, counted in tokens.

    `known` is the prefix that it has, in whole pages; `hit` what a request with exactly these tokens would find;
    `pinned` and `in_use` the parts of `known` that pins and requests protect.
    """

    known: int
    hit: int
    pinned: int
    in_use: int


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start. A request that was retracted looks its tokens up again, and counts again."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    yielded_pins: int = 0


def tree_as_dict(
    roots: Mapping[str, Root], pins: Mapping[Node, int], max_nodes: int, max_depth: int, *, has_salts: bool
) -> dict[str, Any]:
    """`roots`, one a salt, with their `children`, each with children of its own, down to `max_depth` levels.

    A node has its number of `tokens` and their `first_ids`, the number of requests that used it (`uses`), the highest
    `priority` of those, when the last one ended (`last_used`, in ends of requests), how many hold it now (`locks`), how
    many `pins` run through it, and when the pin that ends here, if any, expires (`pinned_until`, in milliseconds).
    `omitted` counts children left out: there are at most `max_nodes` in all. Salts may be secrets: without
    `has_salts` a hash stands for each.
    """
    top: dict[str, Any] = {"omitted": 0, "roots": []}
    queue: deque[tuple[dict[str, Any], str, Collection[Node], int]] = deque([(top, "roots", roots.values(), 0)])
    while queue:
        parent, name, nodes, depth = queue.popleft()
        for node in nodes:
            if depth > max_depth or max_nodes <= 0:
                parent["omitted"] = len(nodes) - len(parent[name])
                break
            max_nodes -= 1
            if isinstance(node, Root):
                data: dict[str, Any] = {"salt": node.salt if has_salts or not node.salt else salt_hash(node.salt)}
            else:
                data = _describe(node, pins)
            parent[name].append(data | {"omitted": 0, "children": []})
            if node.children:
                queue.append((parent[name][-1], "children", node.children.values(), depth + 1))
    return top


def salt_hash(salt: str) -> str:
    """What stands for a salt where it must not be seen."""
    return "#" + hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()


def as_text(dump: Mapping[str, Any]) -> str:
    """The data of `PrefixCache.dump` as indented lines, one a node."""
    numbers = ("now", "page_size", "time", "pins", "free", "tree", "private", "fence", "evictable", "pinned")
    lines = ["  ".join(f"{name} {dump[name]}" for name in numbers if name in dump)]
    stack: list[tuple[int, Mapping[str, Any]]] = [(0, root) for root in reversed(dump["roots"])]
    while stack:
        depth, node = stack.pop()
        lines.append("  " * depth + _line(node))
        if node["omitted"]:
            stack.append((depth + 1, {"more": node["omitted"], "omitted": 0, "children": []}))
        stack.extend((depth + 1, child) for child in reversed(node["children"]))
    if dump["omitted"]:
        lines.append(_line({"more": dump["omitted"]}))
    return "\n".join(lines) + "\n"


def _describe(node: Node, pins: Mapping[Node, int]) -> dict[str, Any]:
    return {
        "tokens": len(node.key) // TOKEN_BYTES,
        "first_ids": array("i", node.key[: FIRST_IDS * TOKEN_BYTES]).tolist(),
        "uses": node.uses,
        "priority": node.priority,
        "last_used": node.last_used,
        "locks": node.locks - node.pins,
        "pins": node.pins,
        "pinned_until": pins.get(node),
    }


def _line(node: Mapping[str, Any]) -> str:
    if "more" in node:
        return f"... {node['more']} more"
    if "salt" in node:
        return f"salt {node['salt'] or '(none)'}"
    ids = " ".join(map(str, node["first_ids"])) + (" ..." if node["tokens"] > len(node["first_ids"]) else "")
    counts = "  ".join(
        f"{name} {node[name]}" for name in ("uses", "priority", "last_used", "locks", "pins") if node[name]
    )
    until = "" if node["pinned_until"] is None else f"  pinned until {node['pinned_until']} ms"
    return f"{node['tokens']} tokens [{ids}]  {counts}{until}"
