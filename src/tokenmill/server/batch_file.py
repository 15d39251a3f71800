"""OpenAI's batch files: lines of requests in, lines of answers out; what a run that was cut short left is kept."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.errors import ConfigError

ANSWER_START = b'{"id":"batch_req_'


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the input. `body` is what would be sent to `url`."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class BatchResponse(msgspec.Struct, frozen=True):
    """What the server answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Why a line was not sent to the server; `line` is its number in the input."""

    code: str
    message: str
    line: int


class BatchAnswer(msgspec.Struct, frozen=True):
    """One line of the output: a response, or an error. `custom_id` is None for lines that have none."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None


class _Answered(msgspec.Struct, frozen=True):
    """What is read again of a line of the output."""

    id: str
    custom_id: str | None
    error: BatchError | None = None


class _Named(msgspec.Struct, frozen=True):
    """As much of a line as tells whose it is."""

    custom_id: str


@dataclass
class Done:
    """Lines that were answered before: by custom_id, or by number where they have none."""

    names: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def has(self, number: int, name: str | None) -> bool:
        """Whether this line was."""
        return number in self.lines if name is None else name in self.names


def new_answer(name: str | None, response: BatchResponse | None, error: BatchError | None = None) -> BatchAnswer:
    """A line for the output, with an id of its own."""
    return BatchAnswer(f"batch_req_{uuid.uuid4().hex}", name, response, error)


def read_lines(path: Path) -> Iterator[tuple[int, str | None, bytes]]:
    """Number, custom_id and text of each line that is not blank. Raises ConfigError: the file cannot be read."""
    named = msgspec.json.Decoder(_Named)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                    try:
                        name: str | None = named.decode(text).custom_id
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        name = None
                    yield number, name, text
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def check_names(path: Path, done: Done) -> tuple[int, int]:
    """The number of lines, and of those that are done.

    Raises ConfigError: two have the same custom_id, or the file cannot be read.
    """
    seen: dict[str, int] = {}
    count = num_done = 0
    for number, name, _ in read_lines(path):
        count += 1
        num_done += done.has(number, name)
        if name is not None and (before := seen.setdefault(name, number)) != number:
            raise ConfigError(f"{path}: lines {before} and {number} have the same custom_id {name[:80]!r}")
    return count, num_done


def parse_line(number: int, text: bytes) -> BatchRequest | BatchError:
    """A line's request, or what is wrong with it."""
    try:
        request = msgspec.json.decode(text, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        advice = "a line is an object of custom_id, method POST, url and body"
        return BatchError("invalid_line", f"line {number}: {error or 'nested too deeply'}: {advice}", number)
    if request.body.get("stream"):
        return BatchError("invalid_line", f"line {number}: a batch has no streams: leave stream out", number)
    return request


def resume(path: Path, done: Done) -> None:
    """Note in `done` what an output file answers; a torn last line is cut off.

    Raises ConfigError: the file is no batch output, and is left alone; or it cannot be read or written.
    """
    answered = msgspec.json.Decoder(_Answered)
    end = 0
    try:
        path.touch()
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if line[: len(ANSWER_START)] != ANSWER_START[: len(line)]:
                        raise ConfigError(f"{path}: line {number} is no answer of a batch: choose another output file")
                    break
                end += len(line)
                _note(answered, line, done, f"{path}: line {number}")
        if path.stat().st_size > end:
            os.truncate(path, end)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from None


def _note(answered: msgspec.json.Decoder[_Answered], line: bytes, done: Done, where: str) -> None:
    try:
        answer = answered.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError(f"{where} is no answer of a batch: choose another output file") from None
    if answer.custom_id is not None:
        done.names.add(answer.custom_id)
    elif answer.error is not None:
        done.lines.add(answer.error.line)
