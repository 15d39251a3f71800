"""Columns of ids to deltas of text: what the detokenizer process does with each message."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tokenmill.text.detokenizer import TextStream
from tokenmill.text.logprobs import LogprobStream, PromptLogprobs
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import FinishReason, TokenLogprobs
from tokenmill.wire import messages as wire

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenRequest:
    """A request whose text is being sent."""

    stream: TextStream
    is_prompt_only: bool
    logprobs: LogprobStream | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_sent: int = 0  # characters
    cached_tokens: int | None = None
    queued: int = 0
    began: int = 0
    first: int = 0
    last: int = 0

    def note(self, now: int, began: int, *, accepted: bool, has_tokens: bool) -> None:
        """News of it came at `now`, in milliseconds; `began` is not 0 if it has begun, or again."""
        if accepted:
            self.queued = now
        self.began = self.began or began
        if has_tokens:
            self.first = self.first or now
            self.last = now

    def timings(self, now: int) -> wire.Timings:
        """When what happened; `now` for what did not."""
        return wire.Timings(*(time or now for time in (self.queued, self.began, self.first, self.last)))

    @classmethod
    def of(cls, tokenizer: Tokenizer, options: wire.TextOptions) -> _OpenRequest:
        stream = TextStream(tokenizer, options)
        request = cls(stream, options.is_prompt_only)
        if options.logprobs is not None:
            request.logprobs = LogprobStream(tokenizer, options.logprobs)
        if options.prompt_logprobs is not None:
            ids = wire.unpack_ids(options.prompt_ids)
            request.prompt_logprobs = PromptLogprobs(tokenizer, options.prompt_logprobs, ids, stream.prompt_offsets)
        return request

    def take_logprobs(
        self, token_ids: list[int], records: bytes, num_new: int, is_whole: bool
    ) -> list[TokenLogprobs] | None:
        """Take in new records; those that go with `num_new` more characters, or all if the text ended as it is."""
        self.num_sent += num_new
        if self.logprobs is None:
            return None
        if records:
            self.logprobs.push(token_ids, self.stream.offsets, records)
        return self.logprobs.release(None if is_whole else self.num_sent)

    def take_prompt_logprobs(self, first: int, records: bytes) -> list[TokenLogprobs] | None:
        """Take in new records; what is new of the prompt."""
        if self.prompt_logprobs is None:
            return None
        self.prompt_logprobs.push(first, records)
        return self.prompt_logprobs.take()


class DetokenizerStage:
    """Columns of ids to deltas of text. Holds one TextStream for each request between its OpenText and its end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: dict[int, _OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """Requests whose text is being sent."""
        return len(self._open)

    def process(self, message: wire.OpenText | wire.TokenBatch) -> tuple[wire.TextBatch | None, list[int]]:
        """Deltas for the API server, and uids that the scheduler must end. Rows of requests that ended are ignored."""
        if isinstance(message, wire.OpenText):
            return self._open_text(message)
        finishes = {finish.uid: finish for finish in message.finished}
        cached, began = dict(message.admitted), dict(message.began)
        accepted = frozenset(message.accepted)
        rows = _rows(message)
        deltas, aborts = [], []
        for uid in dict.fromkeys([*message.accepted, *cached, *message.prompt_logprobs, *rows, *finishes]):
            finish = finishes.get(uid)
            token_ids = rows.get(uid, [])
            if request := self._open.get(uid):
                request.note(message.now, began.get(uid, 0), accepted=uid in accepted, has_tokens=bool(token_ids))
            try:
                delta = self._delta(uid, token_ids, cached.get(uid), finish, uid in accepted, message)
            except Exception:
                delta = self._failed(uid)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._open.pop(uid, None)
                if finish is None:
                    aborts.append(uid)
        return (wire.TextBatch(deltas) if deltas else None), aborts

    def _open_text(self, message: wire.OpenText) -> tuple[wire.TextBatch | None, list[int]]:
        try:
            self._open[message.uid] = _OpenRequest.of(self._tokenizer, message.options)
        except Exception:
            return wire.TextBatch([self._failed(message.uid)]), [message.uid]
        return None, []

    def _failed(self, uid: int) -> wire.TextDelta:
        logger.exception("detokenizing failed for %s", uid)
        error = wire.ErrorInfo("detokenizing failed inside the server; see its log")
        return wire.TextDelta(uid=uid, finish_reason=FinishReason.ERROR, error=error)

    def _delta(
        self,
        uid: int,
        token_ids: list[int],
        cached: int | None,
        finish: wire.Finish | None,
        accepted: bool,
        batch: wire.TokenBatch,
    ) -> wire.TextDelta | None:
        request = self._open.get(uid)
        if request is None:
            return _without_text(uid, cached, finish, accepted)
        stream = request.stream
        if request.cached_tokens is None:  # a request that was retracted is admitted again, with its own tokens cached
            request.cached_tokens = cached
        before = stream.completion_tokens
        text, stop = "", None
        if token_ids and not request.is_prompt_only:
            text, stop = stream.push(token_ids, ends_with_stop_token=finish is not None and finish.is_stop_token)
        if finish is not None and stop is None:
            rest, stop = stream.finish()
            text += rest
        reason = FinishReason.STOP if stop is not None else finish.reason if finish else None
        ends = finish is not None and stop is None
        return wire.TextDelta(
            uid=uid,
            text=text,
            token_ids=wire.pack_ids(token_ids[: stream.completion_tokens - before]),
            completion_tokens=stream.completion_tokens,
            cached_tokens=request.cached_tokens or 0,
            accepted=accepted,
            finish_reason=reason,
            stop_reason=stop if stop is not None else finish.stop_token if finish else None,
            error=finish.error if finish and stop is None else None,
            timings=None if reason is None else request.timings(batch.now),
            logprobs=request.take_logprobs(token_ids, batch.logprobs.get(uid, b""), len(text), ends),
            prompt_logprobs=request.take_prompt_logprobs(*batch.prompt_logprobs.get(uid, (1, b""))),
            embedding=batch.embeddings.get(uid, b""),
        )


def _without_text(uid: int, cached: int | None, finish: wire.Finish | None, accepted: bool) -> wire.TextDelta | None:
    """News of a request that has no text yet, or no more: of its end only an error is news."""
    error = finish.error if finish else None
    if cached is None and error is None and not accepted:
        return None
    reason = FinishReason.ERROR if error else None
    return wire.TextDelta(uid=uid, cached_tokens=cached or 0, accepted=accepted, finish_reason=reason, error=error)


def _rows(batch: wire.TokenBatch) -> dict[int, list[int]]:
    token_ids = wire.unpack_ids(batch.token_ids)
    rows: dict[int, list[int]] = {}
    start = 0
    for uid, count in zip(batch.uids, batch.counts, strict=True):
        rows.setdefault(uid, []).extend(token_ids[start : start + count])
        start += count
    return rows
