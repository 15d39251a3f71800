"""The terminal commands `chat` and `generate`, on anything that streams deltas."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenmill.errors import TokenmillError
from tokenmill.hub import cache_folder
from tokenmill.types import FinishReason, SamplingParams
from tokenmill.wire.messages import TextDelta

INTERRUPTED = 130
MAX_HISTORY_BYTES = 1 << 20
CONTROL_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
HELP = """\
/system TEXT  start anew with this system text; without TEXT: with none
/reset        start anew, keeping the system text
/help         show this
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer. A line that begins with a space is sent as it is, also when a / follows."""


class Streamer(Protocol):
    """The part of `tokenmill.llm.LLM` that the terminal needs."""

    def stream(self, prompt: Any, params: SamplingParams | None = None, /) -> Generator[TextDelta, None, None]:
        """Answer a text, token ids or chat messages; closing the generator aborts the request."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended; `note` tells it in words, with the speed."""

    note: str
    is_interrupted: bool


@dataclass
class Conversation:
    """A chat's messages. Only `answer` adds to them, and only once an answer has text."""

    llm: Streamer
    params: SamplingParams | None = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, text: str, write: Callable[[str], None]) -> Outcome:
        """Stream the answer to `text`; the conversation is as before when this raises TokenmillError."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": text}
        parts: list[str] = []

        def keep(part: str) -> None:
            parts.append(part)
            write(part)

        outcome = _stream(self.llm, [*head, *self.messages, asked], self.params, keep)
        if answer := "".join(parts):
            self.messages += [asked, {"role": "assistant", "content": answer}]
        return outcome

    def command(self, line: str) -> str | None:
        """Carry out a line that begins with /; returns what to show, or None to leave."""
        name, _, argument = line.partition(" ")
        match name:
            case "/exit":
                return None
            case "/help":
                return HELP
            case "/reset":
                self.messages.clear()
                return "new conversation"
            case "/system":
                self.messages.clear()
                self.system = argument.strip() or None
                return "new conversation " + ("with this system text" if self.system else "without a system text")
        return f"unknown command {name}; /help lists them"


def chat(
    llm: Streamer, system: str | None = None, params: SamplingParams | None = None, *, is_terminal: bool | None = None
) -> int:
    """Talk with a model: lines from the terminal or from a pipe, answers to stdout, notes to stderr.

    `system` None leaves the system text to the model's template. With `is_terminal`, by default whether stdin is one,
    lines are edited and notes shown. Returns the exit code: 0, or where lines come from a pipe 1 when one could not be
    answered, 130 after Ctrl-C.
    """
    is_terminal = sys.stdin.isatty() if is_terminal is None else is_terminal
    conversation = Conversation(llm, params, system)
    write = _writer()
    code = 0
    with _end_at_broken_pipe():
        for line in _edited_lines() if is_terminal else sys.stdin:
            if line.startswith("/"):
                reply = conversation.command(line.strip())
                if reply is None:
                    break
                _note(reply)
            elif text := line.strip():
                try:
                    outcome = conversation.answer(text, write)
                except TokenmillError as error:
                    _note(error.message)
                    code = 1
                    continue
                write("\n")
                if is_terminal:
                    _note(outcome.note)
                elif outcome.is_interrupted:
                    return INTERRUPTED
    return 0 if is_terminal else code


def generate(llm: Streamer, prompt: str, params: SamplingParams | None = None) -> int:
    """Stream the continuation of `prompt` to stdout; returns the exit code, 130 after Ctrl-C.

    Raises TokenmillError when the request was refused or failed.
    """
    write = _writer()
    with _end_at_broken_pipe():
        outcome = _stream(llm, prompt, params, write)
        write("\n")
        return INTERRUPTED if outcome.is_interrupted else 0
    return 0


def _stream(
    llm: Streamer, prompt: str | Sequence[dict[str, Any]], params: SamplingParams | None, write: Callable[[str], None]
) -> Outcome:
    started, first, tokens_at_first, tokens = time.perf_counter(), None, 0, 0
    is_interrupted, how = False, ""
    with closing(llm.stream(prompt, params)) as deltas:
        try:
            for delta in deltas:
                write(delta.text)
                tokens = delta.completion_tokens
                how = "length limit reached; " if delta.finish_reason is FinishReason.LENGTH else ""
                if first is None and tokens:
                    first, tokens_at_first = time.perf_counter(), tokens
        except KeyboardInterrupt:  # `LLM` lets it strike between steps only
            is_interrupted, how = True, "stopped; "
    now = time.perf_counter()
    first = first or now
    later = tokens - tokens_at_first
    speed = f", {later / (now - first):.1f} tokens/s" if later and now > first else ""
    return Outcome(f"{how}{tokens} tokens, first after {first - started:.2f} s{speed}", is_interrupted)


@contextmanager
def _end_at_broken_pipe() -> Iterator[None]:
    """Ends the block in peace when the reader has left (`| head`); the interpreter's last flush must not fail."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _writer() -> Callable[[str], None]:
    """Writes to stdout at once. A terminal gets no control characters, which could move its cursor or worse."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")
    is_terminal = out.isatty()

    def write(text: str) -> None:
        out.write(text.translate(CONTROL_CHARACTERS) if is_terminal else text)
        out.flush()

    return write


def _note(text: str) -> None:
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def _edited_lines() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = cache_folder() / "chat_history"
    try:
        _prepare_history(path)
        history: FileHistory | InMemoryHistory = FileHistory(path)
    except OSError:
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history)
    _note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            _note("Ctrl-D or /exit leaves")
        except EOFError:
            return


def _prepare_history(path: Path) -> None:
    """A file that only its owner reads, cut to its newer half when it has grown too long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    if path.stat().st_size > MAX_HISTORY_BYTES:
        newer = path.read_bytes()[-MAX_HISTORY_BYTES // 2 :]
        path.write_bytes(newer[newer.find(b"\n\n") + 1 :])
