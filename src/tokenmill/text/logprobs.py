"""Records of logprobs to what clients see: with each token's text, and no sooner than the text that it begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import Logprob, TokenLogprobs


class LogprobStream:
    """Logprobs of one text's tokens: held back as long as the text is that they begin.

    Args:
        tokenizer: the model's.
        top: how many of the likeliest tokens each record has.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._spell = tokenizer.spell
        self._top = top
        self._held: list[TokenLogprobs] = []

    def push(self, token_ids: Sequence[int], offsets: Sequence[int], records: bytes) -> None:
        """Take in records as TokenBatch has them; those beyond `offsets` are left out.

        `offsets` tell where in the text the tokens begin.
        """
        width = 2 + 2 * self._top
        numbers, logprobs = array("i", records), array("f", records)
        for token_id, offset, at in zip(token_ids, offsets, range(0, len(numbers), width), strict=False):
            top = [
                self._logprob(numbers[place], logprobs[place + 1], rank)
                for rank, place in enumerate(range(at + 2, at + width, 2), start=1)
            ]
            self._held.append(TokenLogprobs(self._logprob(token_id, logprobs[at], numbers[at + 1]), top, offset))

    def push_first(self, token_id: int) -> None:
        """The first token of a prompt has no logprob."""
        self._held.append(TokenLogprobs(self._logprob(token_id, None, 0), [], 0))

    def release(self, length: int | None) -> list[TokenLogprobs]:
        """Those that begin in the first `length` characters; None: all that are left."""
        ends = (index for index, its in enumerate(self._held) if length is not None and its.offset >= length)
        count = next(ends, len(self._held))
        released, self._held = self._held[:count], self._held[count:]
        return released

    def _logprob(self, token_id: int, logprob: float | None, rank: int) -> Logprob:
        return Logprob(token_id, *self._spell(token_id), logprob, rank)


class PromptLogprobs:
    """Those of a prompt, in the parts in which it is computed: after a retraction some may come again.

    Args:
        tokenizer: the model's.
        top: how many of the likeliest tokens each record has.
        token_ids: the prompt.
        offsets: where in the text its tokens begin.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, token_ids: Sequence[int], offsets: Sequence[int]) -> None:
        self._stream = LogprobStream(tokenizer, top)
        self._record_size = 4 * (2 + 2 * top)
        self._token_ids, self._offsets = token_ids, offsets
        self._known = 1
        self._stream.push_first(token_ids[0])

    def push(self, first: int, records: bytes) -> None:
        """Records of the tokens from position `first` on."""
        records = records[max(0, self._known - first) * self._record_size :]
        known = self._known
        self._stream.push(self._token_ids[known:], self._offsets[known:], records)
        self._known += len(records) // self._record_size

    def take(self) -> list[TokenLogprobs]:
        """What is new."""
        return self._stream.release(None)
