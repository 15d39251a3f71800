"""Traces for `tokenmill simulate`: files of known formats, and seeded ones. Requests are made one by one.

Prompts are token ids of which only equality matters: equal blocks, texts or prefix groups give equal ids, and whatever
else gives ids of its own.
"""

from __future__ import annotations

import csv
import json
import math
import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec
import numpy as np

from tokenmill.bench.options import Lengths, Synthesis
from tokenmill.errors import ConfigError
from tokenmill.sched.simulate import TraceRequest

T = TypeVar("T")

SHARED_IDS = 2**30  # ids above are given once
CHUNK_CHARACTERS, MOST_CHARACTERS = 1 << 20, 1 << 26  # read at once; of one object
BYTES_PER_TOKEN = 4
ANSWERS = frozenset(("gpt", "assistant", "chatgpt", "bard", "bing", "model"))


class Row(msgspec.Struct):
    """What a line of any file may tell besides lengths and arrival."""

    tenant: str = ""
    priority: int = 0
    deadline_ms: float | None = None

    def request(self, arrival: float, token_ids: array[int], output_len: int, output_id: int) -> TraceRequest:
        """The request of this line, in seconds."""
        deadline = None if self.deadline_ms is None else self.deadline_ms / 1000
        ids = token_ids, max(output_len, 1), output_id
        return TraceRequest(arrival, *ids, tenant=self.tenant, priority=self.priority, deadline=deadline)


class BlockRow(Row, kw_only=True):
    """A line of Mooncake's traces: blocks of 512 tokens, arrivals in milliseconds (github.com/kvcache-ai/Mooncake)."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class BailianRow(BlockRow, kw_only=True):
    """A line of Qwen-Bailian: blocks of 16 tokens, seconds (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)."""

    chat_id: int


class CsvRow(Row, kw_only=True):
    """A line with a header; prompts of one group have their first `prefix` tokens in common, or all they can."""

    arrival: float
    prompt: int
    output: int
    group: str = ""
    prefix: int | None = None


class Turn(msgspec.Struct):
    """Something said in a conversation."""

    sender: str = msgspec.field(name="from")
    value: str


class Conversation(Row, kw_only=True):
    """A conversation as in ShareGPT's files."""

    conversations: list[Turn]


def open_trace(name: str, synthesis: Synthesis, count_tokens: Callable[[str], int] | None) -> Iterator[TraceRequest]:
    """Requests in order of arrival: of a kind of seeded trace, or of a file, at most `synthesis.requests` of either.

    Conversations come by chance, at `synthesis.rate`, and each turn but the first `think` after the answer before it;
    like agents they count as one.

    Raises:
        ConfigError: there is no such file or kind, or it cannot be read; with its line.
    """
    if name in SYNTHETIC:
        return islice(SYNTHETIC[name](Maker(synthesis)), synthesis.requests)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"there is no trace {name!r}: name a file, or one of {', '.join(SYNTHETIC)}")
    return islice(_in_order(path, _read(path, synthesis, count_tokens or rough_count)), synthesis.requests)


def rough_count(text: str) -> int:
    """About as many tokens as usual vocabularies make of a text."""
    return -(-len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


class Maker:
    """Draws requests from a seed."""

    def __init__(self, synthesis: Synthesis) -> None:
        self.it = synthesis
        self._fresh = fresh_ids()
        self._draw = random.Random(f"{synthesis.seed}/trace")
        self._tenants = [f"tenant{index}" for index in range(synthesis.tenants)]
        self._weights = [1 / (1 + index) for index in range(max(synthesis.tenants, synthesis.groups))]

    def arrivals(self, rate: float) -> Iterator[float]:
        """A Poisson process."""
        now = 0.0
        while True:
            now += self._draw.expovariate(rate)
            yield now

    def group(self) -> int:
        """The number of a group; the first are the largest."""
        return self._draw.choices(range(self.it.groups), self._weights[: self.it.groups])[0]

    def tenant(self) -> str:
        """A tenant; the first have most requests."""
        return self._draw.choices(self._tenants, self._weights[: len(self._tenants)])[0]

    def request(self, arrival: float, prefix: array[int] | None = None) -> TraceRequest:
        """A request whose prompt has tokens of its own behind `prefix`."""
        return self.call(arrival, prefix or array("i"), self.lengths(), self.tenant())

    def call(self, arrival: float, prefix: array[int], lengths: Lengths, tenant: str) -> TraceRequest:
        """A request with so many tokens of its own behind `prefix`, and so many to draw."""
        own, output = lengths
        return TraceRequest(arrival, prefix + repeat(next(self._fresh), own), output, next(self._fresh), tenant)

    def calls(self, tenant: str, rest: Sequence[tuple[float, Lengths]], before: TraceRequest) -> TraceRequest:
        """`before`, followed by calls with all that was said before and something new, at these times and lengths."""

        def follow_up() -> TraceRequest:
            said = before.token_ids + repeat(before.output_id, before.output_len)
            return self.calls(tenant, rest[1:], self.call(rest[0][0], said, rest[0][1], tenant))

        before.follow_up = follow_up if rest else None
        return before

    def lengths(self) -> Lengths:
        """Tokens of a prompt and its output, evenly spread over the logarithms of their ranges."""
        prompt, output = (
            round(math.exp(self._draw.uniform(math.log(least), math.log(most))))
            for least, most in (self.it.prompt, self.it.output)
        )
        return prompt, output

    def pause(self) -> float:
        """Time between an answer and the next call."""
        return self._draw.expovariate(1 / self.it.think)


def poisson(make: Maker) -> Iterator[TraceRequest]:
    """Requests that come by chance and share nothing."""
    return (make.request(arrival) for arrival in make.arrivals(make.it.rate))


def bursts(make: Maker) -> Iterator[TraceRequest]:
    """Requests that come many at once."""
    arrivals = make.arrivals(make.it.rate / make.it.burst)
    return (make.request(arrival) for arrival in arrivals for _ in range(make.it.burst))


def shared_prefixes(make: Maker) -> Iterator[TraceRequest]:
    """Requests that come by chance, each with one of a few prefixes, some of which are used much."""
    for arrival in make.arrivals(make.it.rate):
        yield make.request(arrival, repeat(1 + make.group(), make.it.prefix))


def agents(make: Maker) -> Iterator[TraceRequest]:
    """Agents that come by chance with a common prefix, and call again and again with all that was said."""
    for arrival in make.arrivals(make.it.rate):
        first, tenant = repeat(1 + make.group(), make.it.prefix), make.tenant()
        # All is drawn here: the order in which agents go on differs from policy to policy.
        rest = [(make.pause(), make.lengths()) for _ in range(make.it.turns - 1)]
        yield make.calls(tenant, rest, make.call(arrival, first, make.lengths(), tenant))


SYNTHETIC: Mapping[str, Callable[[Maker], Iterator[TraceRequest]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "shared-prefixes": shared_prefixes,
    "agents": agents,
}


def repeat(token: int, length: int) -> array[int]:
    """`length` times the same id."""
    return array("i", (token,)) * length


def fresh_ids() -> Iterator[int]:
    """Ids that nothing else has."""
    return (SHARED_IDS + number % SHARED_IDS for number in count())


def shared_id(content: str) -> int:
    """The id that stands for this content wherever it occurs."""
    return 1 + zlib.crc32(content.encode(errors="replace")) % (SHARED_IDS - 1)


def _read(path: Path, synthesis: Synthesis, count_tokens: Callable[[str], int]) -> Iterator[tuple[int, TraceRequest]]:
    """Line numbers and requests of a file, whose kind its name and first line tell."""
    fresh = fresh_ids()
    arrivals = Maker(synthesis).arrivals(synthesis.rate)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for line, found in _csv_rows(file) if path.suffix == ".csv" else _json_rows(path, file):
            if "arrival" in found:
                yield line, _from_csv(_convert(path, line, found, CsvRow), next(fresh), next(fresh))
            elif "conversations" in found:
                conversation = _convert(path, line, found, Conversation)
                turns = _turns(conversation, count_tokens, synthesis.think)
                first = next(turns, None)
                if first is not None:
                    first.arrival = next(arrivals)
                    yield line, first
            elif "chat_id" in found:
                yield line, _from_blocks(_convert(path, line, found, BailianRow), 16, 1.0, fresh)
            else:
                yield line, _from_blocks(_convert(path, line, found, BlockRow), 512, 1e-3, fresh)


def _in_order(path: Path, requests: Iterator[tuple[int, TraceRequest]]) -> Iterator[TraceRequest]:
    begin = last = None
    for line, request in requests:
        begin = request.arrival if begin is None else begin
        if last is not None and request.arrival < last:
            raise ConfigError(f"{path}:{line}: this request comes before the one above it: sort the file by arrival")
        if not len(request.token_ids):
            raise ConfigError(f"{path}:{line}: the prompt has no tokens: it must have at least one")
        last = request.arrival
        request.arrival -= begin
        yield request


def _from_blocks(row: BlockRow, block: int, unit: float, fresh: Iterator[int]) -> TraceRequest:
    """Block number h is the id h + 1, again and again; what no block tells of is the request's own."""
    ids = [1 + number % (SHARED_IDS - 1) for number in row.hash_ids[: -(-row.input_length // block)]]
    token_ids = array("i", np.repeat(np.array(ids, np.int32), block)[: row.input_length].tobytes())
    token_ids += repeat(next(fresh), row.input_length - len(token_ids))
    return row.request(row.timestamp * unit, token_ids, row.output_length, next(fresh))


def _from_csv(row: CsvRow, own_id: int, output_id: int) -> TraceRequest:
    shared = min(row.prompt, row.prompt if row.prefix is None else row.prefix) if row.group else 0
    token_ids = repeat(shared_id(row.group), shared) + repeat(own_id, row.prompt - shared)
    return row.request(row.arrival, token_ids, row.output, output_id)


def _turns(row: Conversation, count_tokens: Callable[[str], int], think: float) -> Iterator[TraceRequest]:
    """A request for each answer; its prompt is all that was said before."""
    said = array("i")
    calls: list[TraceRequest] = []
    for turn in row.conversations:
        token, length = shared_id(turn.value), count_tokens(turn.value)
        if turn.sender in ANSWERS and said and length:
            calls.append(row.request(think, said[:], length, token))
        said += repeat(token, length)
    for before, after in pairwise(calls):
        before.follow_up = partial(_same, after)
    return iter(calls)


def _same(request: TraceRequest) -> TraceRequest:
    return request


def _convert(path: Path, line: int, found: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}:{line}: {error}") from None


def _csv_rows(file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file, skipinitialspace=True)
    for row in reader:
        yield reader.line_num, {"arrival": None} | {name: value for name, value in row.items() if name and value}


def _json_rows(path: Path, file: TextIO) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Objects of a file that has one a line, or is one list, with the line in which each begins."""
    decoder = json.JSONDecoder()
    text, at, line = file.read(CHUNK_CHARACTERS), 0, 1
    while True:
        begin = at
        while at < len(text) and text[at] in " \t\r\n,[]":
            at += 1
        line += text.count("\n", begin, at)
        try:
            if at == len(text):
                raise json.JSONDecodeError("nothing", text, at)
            found, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            has_room = len(text) - at < MOST_CHARACTERS
            more = file.read(CHUNK_CHARACTERS + len(text) - at) if has_room else ""
            if more:
                text, at = text[at:] + more, 0
                continue
            if at == len(text):
                return
            raise ConfigError(f"{path}:{line}: this is no JSON: {error.msg}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path}:{line}: a request must be an object, not {text[at:end][:20]}")
        yield line, found
        line += text.count("\n", at, end)
        at = end
