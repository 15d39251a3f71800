"""`tokenmill bench http`: what a streamed token costs between the scheduler and the client, without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

from tokenmill import __version__
from tokenmill.bench.options import HttpOptions
from tokenmill.bench.paced import NUM_WORDS, words
from tokenmill.bench.report import Report
from tokenmill.clock import milliseconds
from tokenmill.errors import ConfigError, StartFailed
from tokenmill.hub import resolve_model
from tokenmill.text.tokenizer import Tokenizer

CONTENT = re.compile(rb'"content":"((?: [A-Za-z]+)+)"')
PATIENCE = 60
TICKS = os.sysconf("SC_CLK_TCK")


class Streams:
    """Clients of one measurement: they count tokens, and how late each is, while `is_measured`."""

    def __init__(self, number: int, times: dict[bytes, int], max_tokens: int) -> None:
        self.num_tokens = self.num_events = 0
        self.delays: list[int] = []
        self.is_measured = False
        self._times = times
        self._silent = number
        self.all_began = asyncio.Event()
        message = {"role": "user", "content": "Tell me the time."}
        body = {"messages": [message], "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        content = json.dumps(body).encode()

        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self.request = head + b"Content-Length: %d\r\n\r\n" % len(content) + content

    def began(self) -> None:
        """One more stream has text."""
        self._silent -= 1
        if not self._silent:
            self.all_began.set()

    def note(self, data: bytes) -> None:
        """Take in what has come of one stream."""
        now = milliseconds()
        for content in CONTENT.findall(data):
            self.num_events += 1
            for word in content.split(b" ")[1:]:
                self.num_tokens += 1
                self.delays.append((now - self._times[word]) % NUM_WORDS)


class Stream(asyncio.Protocol):
    """One of them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast(asyncio.WriteTransport, transport).write(self._streams.request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        if self._streams.is_measured:
            self._streams.note(data)
        elif not self._has_begun and b'"content":" ' in data:
            self._has_begun = True
            self._streams.began()


def run(options: HttpOptions) -> None:
    """Measure and print. Raises ConfigError: this is not Linux, or the model has too few words."""
    if not Path("/proc/self/stat").exists():
        raise ConfigError("bench http reads the processor time of processes from /proc: it needs Linux")
    tokenizer = Tokenizer.load(resolve_model(options.model))
    times = {tokenizer.decode([token_id])[1:].encode(): index for index, token_id in enumerate(words(tokenizer))}
    setup = {"machine": platform.processor() or platform.machine(), "cores": str(os.cpu_count())}
    setup |= {"API workers": str(options.api_workers), "tokenmill": __version__, "python": platform.python_version()}
    report = Report(setup, as_json=options.json)
    for number in options.streams:
        with _server(options) as (process, host, port):
            streams = Streams(number, times, int(options.stream_rate * (options.seconds + 60)))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                measuring = _measure(streams, number, process.pid, host, port, options.seconds)
                spent, seconds = runner.run(measuring)
        per_thousand = {name: 1e6 * its / max(1, streams.num_tokens) for name, its in spent.items()}
        cuts = statistics.quantiles(streams.delays, n=100)
        report.line(
            streams=number,
            tokens_a_second=streams.num_tokens / seconds,
            tokens_a_chunk=streams.num_tokens / max(1, streams.num_events),
            api_cpu_ms=per_thousand["api"],
            detokenizer_cpu_ms=per_thousand["detokenizer"],
            cpu_ms_a_1000_tokens=sum(per_thousand.values()),
            delay_p50_ms=cuts[49],
            delay_p99_ms=cuts[98],
        )
    report.table()


async def _measure(
    streams: Streams, number: int, pid: int, host: str, port: int, seconds: float
) -> tuple[dict[str, float], float]:
    """Seconds of processor time by process, and the seconds in which they were spent."""
    loop = asyncio.get_running_loop()
    connections = [await loop.create_connection(lambda: Stream(streams), host, port) for _ in range(number)]
    try:
        with _told(f"not all of {number} streams had text within {PATIENCE} s"):
            await asyncio.wait_for(streams.all_began.wait(), PATIENCE)
        before, began, streams.is_measured = _processor_time(pid), time.monotonic(), True
        await asyncio.sleep(seconds)
        after, ended, streams.is_measured = _processor_time(pid), time.monotonic(), False
        return {name: after[name] - before[name] for name in after}, ended - began
    finally:
        for transport, _ in connections:
            transport.abort()


def _processor_time(parent: int) -> dict[str, float]:
    """Seconds that the API's processes, with `parent` among them, and the detokenizer have computed."""
    spent = {"api": 0.0, "detokenizer": 0.0}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            kind = "detokenizer" if name == "tm-detokenizer" else "api"
            is_ours = int(fields[1]) == parent and (name == "tm-detokenizer" or name.startswith("tm-api-"))
            if is_ours or int(path.parent.name) == parent:
                spent[kind] += (int(fields[11]) + int(fields[12])) / TICKS
    return spent


@contextlib.contextmanager
def _told(words: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise StartFailed(words) from None


@contextlib.contextmanager
def _server(options: HttpOptions) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    command = [
        sys.executable,
        "-m",
        "tokenmill.bench.paced",
        options.model,
        str(options.rate),
        str(options.stream_rate),
    ]
    command += [str(options.api_workers), str(int(options.profile))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise StartFailed("the server that is to be measured did not start; see above")
            where = urlsplit(found[0])
            yield process, where.hostname or "", where.port or 0
        finally:
            process.terminate()
            process.wait()
