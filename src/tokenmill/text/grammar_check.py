"""Whether a grammar can be used, found out in a process that may be lost: compilers have inputs that they take for
ever with, or that end their process. What passes there is compiled again where it is used.
"""

from __future__ import annotations

import random
import re
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from subprocess import Popen

from llguidance import LLTokenizer

from tokenmill.errors import InvalidRequest
from tokenmill.procs import helper_pipe, start_helper
from tokenmill.text.grammar import Compiled, Vocabulary, compile_matcher
from tokenmill.types import StructuredOutputs

CHECK_SECONDS = 2.0
START_SECONDS = 60.0
PATIENCE = 10.0
MEMORY_BYTES = 2 << 30
STACK_BYTES = 4 << 20  # less than any thread has that works with a matcher
WALK_TOKENS = 8
MAX_WORDS = 600
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): (failed to compile JSON schema: )?")
SNIPPET = re.compile(r"\s*(\d+ \||\^+\s*$|<non-verbose/>)")


class GrammarCheck:
    """Checks grammars one at a time; its process is started by the first one and after each that it does not survive.

    The process ends with this one. `load` tells the vocabulary when it starts.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._compiled = Compiled(self._check, PATIENCE)
        self._load = load
        self._helper: tuple[Connection, Popen[bytes]] | None = None

    def start(self, wanted: StructuredOutputs) -> Future[None]:
        """Begin to check; see `Compiled.start`."""
        return self._compiled.start(wanted)

    def check(self, wanted: StructuredOutputs) -> None:
        """Wait for the verdict.

        Raises:
            InvalidRequest: in the compiler's own words, or because it takes too much time or memory.
            Overloaded: others took too long.
        """
        future = self.start(wanted)
        try:
            future.result()
        except InvalidRequest as error:
            raise InvalidRequest(f"{wanted.param}: {error.message}", wanted.param) from None

    def close(self) -> None:
        """End thread and process."""
        self._compiled.close()
        self._end_helper()

    def _check(self, source: str) -> None:
        if self._helper is None:
            self._helper = start_helper(__name__)
            self._ask(self._load(), START_SECONDS)
        words = self._ask(source, CHECK_SECONDS)
        if words is None:
            self._end_helper()
            words = f"it takes over {CHECK_SECONDS:g} s or {MEMORY_BYTES >> 30} GiB to compile, or is nested too deeply"
        if words:
            raise InvalidRequest(words)

    def _ask(self, question: Vocabulary | str, seconds: float) -> str | None:
        """The answer; None: there is none in time, or no more process."""
        assert self._helper is not None
        pipe, _ = self._helper
        with suppress(EOFError, OSError):
            pipe.send(question)
            if pipe.poll(seconds):
                return str(pipe.recv())
        return None

    def _end_helper(self) -> None:
        if self._helper is not None:
            pipe, process = self._helper
            self._helper = None
            pipe.close()
            process.kill()
            process.wait()


def verdict(tokenizer: LLTokenizer, source: str) -> str:
    """What is wrong with a grammar as far as its compilation and a few steps tell; or nothing."""
    matcher = compile_matcher(tokenizer, source)
    chance = random.Random(0)
    for step in range(WALK_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return _words(matcher.get_error())
        turned = chance.randrange(len(mask))
        tail = (mask[turned:] + mask[:turned]).lstrip(b"\0")
        if not tail:
            return "nothing satisfies it, as far as this model has tokens for it" if step == 0 else ""
        bit = (tail[0] & -tail[0]).bit_length() - 1
        token_id = (turned + len(mask) - len(tail)) % len(mask) * 8 + bit
        if token_id in tokenizer.eos_tokens:
            return ""
        matcher.consume_token(token_id)
    return ""


def _words(error: str) -> str:
    """An error of llguidance without its picture of the source."""
    words = " ".join(line.strip() for line in error.splitlines() if not SNIPPET.match(line))
    place = PLACE.match(words)
    if place is not None:
        line, column, is_schema = place.groups()
        words = ("" if is_schema else f"line {line}, column {column}: ") + words[place.end() :]
    half = MAX_WORDS // 2
    return words if len(words) <= MAX_WORDS else f"{words[:half]} ... {words[-half:]}"


def _serve(pipe: Connection) -> None:
    with suppress(EOFError):
        tokenizer = pipe.recv().tokenizer()
        pipe.send("")
        while True:
            pipe.send(verdict(tokenizer, pipe.recv()))


def main() -> None:
    """The process: takes a vocabulary, then grammars, each of which it answers with what is wrong with it."""
    pipe = helper_pipe("grammars")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(pipe,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
