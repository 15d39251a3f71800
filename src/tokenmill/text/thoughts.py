"""Thoughts before what an output must be: free, up to their end tag or a number of tokens, after which it is forced.

A budget is kept, like a grammar, by masks of what may be drawn, from the ids drawn before: so it holds with overlapping
steps and after a retraction, and costs only requests that ask for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from llguidance import LLMatcher

from tokenmill.types import Thoughts


class ThoughtMatcher:
    """A matcher that lets thoughts pass and hands the rest to `inner`, or lets all of it pass if there is none.

    It is in one of four states: "before" thoughts, whose first ids may come; "inside"; "closing", where only the end
    tag's ids may come; "after". `texts` are the bytes of each id; `end_ids` may not come within thoughts if there is an
    inner matcher, whose output they would leave out.
    """

    def __init__(
        self, inner: LLMatcher | None, thoughts: Thoughts, texts: Sequence[bytes], end_ids: Sequence[int]
    ) -> None:
        self._inner = inner
        self._thoughts = thoughts
        self._texts = texts
        self._hidden = end_ids if inner is not None else ()
        self._tag = b"".join(texts[token_id] for token_id in thoughts.end)
        self._tail = b""
        self._last: list[int] = []
        self._place = self._count = 0
        self._state = "before" if thoughts.start else "inside"
        self._look_at_budget()

    def consume_tokens(self, sampled_tokens: list[int], /) -> bool:
        """Go on by these ids; False: one of them was not allowed."""
        return all(self._consume(token_id) for token_id in sampled_tokens)

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int, /) -> None:
        """Write one bit an id: whether it may come next."""
        mask = (ctypes.c_uint8 * trg_byte_size).from_address(trg_pointer)
        must = self._must_come
        if must is not None:
            ctypes.memset(trg_pointer, 0, trg_byte_size)
            _set(mask, must, True)
        elif self._inner is not None and self._state in ("before", "after"):
            self._inner.unsafe_compute_mask_ptr(trg_pointer, trg_byte_size)
        else:
            ctypes.memset(trg_pointer, 0xFF, trg_byte_size)
            for token_id in self._hidden if self._state == "inside" else ():
                _set(mask, token_id, False)
        if self._state == "before":
            _set(mask, self._thoughts.start[self._place], True)

    def is_error(self) -> bool:
        """Whether nothing more can be told."""
        return self._inner is not None and bool(self._inner.is_error())

    def get_error(self) -> str:
        """Why."""
        return "" if self._inner is None else str(self._inner.get_error())

    @property
    def _must_come(self) -> int | None:
        if self._state == "closing":
            return self._thoughts.end[self._place]
        return self._thoughts.start[self._place] if self._state == "before" and self._place else None

    def _consume(self, token_id: int) -> bool:
        if self._state == "before":
            if token_id != self._thoughts.start[self._place]:
                self._state = "after"
                return self._consume(token_id)
            self._place += 1
            if self._place == len(self._thoughts.start):
                self._state, self._place = "inside", 0
                self._look_at_budget()
        elif self._state == "inside":
            self._count += 1
            self._last = [*self._last, token_id][-len(self._thoughts.end) :]
            self._tail = (self._tail + self._texts[token_id])[-(len(self._tag) + len(self._texts[token_id])) :]
            if self._tag in self._tail:
                self._state = "after"
            else:
                self._look_at_budget()
        elif self._state == "closing":
            self._place += 1
            if self._place == len(self._thoughts.end):
                self._state = "after"
        else:
            return self._inner is None or bool(self._inner.consume_tokens([token_id]))
        return True

    def _look_at_budget(self) -> None:
        budget = self._thoughts.budget
        if self._state == "inside" and budget is not None and self._count >= budget:
            end, last = self._thoughts.end, self._last
            # What there is of the tag already is not written twice.
            self._place = next(size for size in range(len(end) - 1, -1, -1) if last[len(last) - size :] == end[:size])
            self._state = "closing"


def _set(mask: ctypes.Array[ctypes.c_uint8], token_id: int, value: bool) -> None:
    bit = 1 << (token_id & 7)
    mask[token_id >> 3] = mask[token_id >> 3] | bit if value else mask[token_id >> 3] & ~bit
