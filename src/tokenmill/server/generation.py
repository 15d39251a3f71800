"""What comes of one HTTP request, between the engine's messages and the handler that writes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from tokenmill.errors import DeadlinePassed, TokenmillError
from tokenmill.server.errors import EngineError
from tokenmill.types import FinishReason, TokenLogprobs, Usage
from tokenmill.wire import messages as wire


class Generation:
    """The answers to one HTTP request: choice index = prompt number * n + choice.

    Deltas that wait for a slow reader are merged, so the buffer is never larger than the text itself.
    """

    def __init__(self, num_prompts: int, n: int, name: str = "") -> None:
        self.name = name
        self.num_choices = num_prompts * n
        self._n = n
        self._sleeper: asyncio.Future[None] | None = None
        self._pending: dict[int, wire.TextDelta] = {}
        self._error: TokenmillError | None = None
        self._is_nudged = False
        self._not_accepted = set(range(self.num_choices))
        self._not_finished = set(range(self.num_choices))
        self._not_tokenized = num_prompts
        self.is_thinking = False
        self._times: list[wire.Timings] = []
        self._prompt_tokens = 0
        self._scored: dict[int, list[TokenLogprobs]] = {}  # of prompts whose text was not sent yet
        self._cached = [0] * self.num_choices
        self._completion = [0] * self.num_choices

    @property
    def usage(self) -> Usage:
        """Counts so far: each prompt once, the tokens of all choices; cached tokens are those of each first choice."""
        return Usage(self._prompt_tokens, sum(self._completion), sum(self._cached[:: self._n]))

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended."""
        return not (self._not_finished or self._not_tokenized)

    @property
    def timings(self) -> dict[str, float | None]:
        """Seconds until the first choice began, from there to its first token, and until the last one ended."""
        times = self._times
        if not times:
            return {"queue": None, "prefill": None, "decode": None, "tokens_per_second": None}
        queued, began, first = (min(getattr(its, name) for its in times) for name in ("queued", "began", "first"))
        decode = max(its.last for its in times) - first
        later = sum(self._completion) - len(times)
        speed = round(1000 * later / decode, 2) if decode > 0 else None
        seconds = {"queue": began - queued, "prefill": first - began, "decode": decode}
        return {name: value / 1000 for name, value in seconds.items()} | {"tokens_per_second": speed}

    async def accepted(self) -> None:
        """Wait until every choice is in the scheduler's queue, or further; raises the TokenmillError that ended one."""
        while self._error is None and (self._not_tokenized or self._not_accepted):
            await self._wait()
        if self._error is not None:
            raise self._error

    async def deltas(self) -> AsyncIterator[list[tuple[int, wire.TextDelta]]]:
        """What is new, as (choice index, delta), until every choice has ended.

        Raises TokenmillError when a choice failed, or the client left; text from before comes first.
        """
        while True:
            if self._pending:
                pending, self._pending = self._pending, {}
                yield list(pending.items())
            elif self._error is not None:
                raise self._error
            elif self.has_ended:
                return
            elif self._is_nudged:
                self._is_nudged = False
                yield []
            else:
                await self._wait()

    def nudge(self) -> None:
        """Have `deltas` give an empty list, if there is nothing else."""
        self._is_nudged = True
        self._wake()

    def cancel(self) -> None:
        """End every choice that has not ended, as it is."""
        self._not_tokenized = 0
        for index in sorted(self._not_finished):
            ends = wire.TextDelta(uid=0, completion_tokens=self._completion[index], finish_reason=FinishReason.ABORT)
            self.add(index, ends)

    def fail(self, error: TokenmillError) -> None:
        """End with this error; the first one stays."""
        if self._error is None:
            self._error = error
        self._wake()

    def tokenized(self, prompt_tokens: int, is_thinking: bool) -> None:
        """One prompt is tokenized; `is_thinking`: it ends within thoughts."""
        self._not_tokenized = max(0, self._not_tokenized - 1)  # a cancelled request waits for none
        self._prompt_tokens += prompt_tokens
        self.is_thinking = is_thinking
        self._wake()

    def add(self, index: int, delta: wire.TextDelta) -> None:
        """Take in what is new of one choice."""
        self._not_accepted.discard(index)
        self._cached[index] = max(self._cached[index], delta.cached_tokens)
        self._completion[index] = max(self._completion[index], delta.completion_tokens)
        if delta.finish_reason is not None:
            self._not_finished.discard(index)
        if delta.timings is not None:
            self._times.append(delta.timings)
        if delta.error is not None or delta.finish_reason is FinishReason.ERROR:
            self.fail(EngineError(delta.error or wire.ErrorInfo("the request failed; the server's log may tell why")))
        elif delta.finish_reason is FinishReason.DEADLINE and not any(self._completion):
            self.fail(DeadlinePassed())
        elif delta.text or delta.logprobs or delta.finish_reason is not None:
            if scored := self._scored.pop(index, None):
                delta = msgspec.structs.replace(delta, prompt_logprobs=scored + (delta.prompt_logprobs or []))
            before = self._pending.get(index)
            self._pending[index] = delta if before is None else _merge(before, delta)
        elif delta.prompt_logprobs:
            self._scored.setdefault(index, []).extend(delta.prompt_logprobs)
        self._wake()

    async def _wait(self) -> None:
        self._sleeper = asyncio.get_running_loop().create_future()
        await self._sleeper

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


def _merge(first: wire.TextDelta, second: wire.TextDelta) -> wire.TextDelta:
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        accepted=True,
        logprobs=first.logprobs if second.logprobs is None else (first.logprobs or []) + second.logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
