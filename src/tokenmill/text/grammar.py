"""From what an output must be to matchers of llguidance, which tell the ids that may come next.

Matchers work on the bytes of tokens and never ask for a tokenization, so that what they allow depends on the text so
far and nothing else.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Backend

from tokenmill.errors import InvalidRequest, Overloaded
from tokenmill.text.thoughts import ThoughtMatcher
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import MAX_GRAMMAR, StructuredOutputs

MAX_KEPT, MAX_KEPT_SIZE = 1024, 2**23  # as many as may wait: one that is forgotten would hold up the step it is for
FAILURE_SECONDS = 30.0
STACK_BYTES = 64 << 20  # far more than what `text.grammar_check` lets pass needs
NO_FORCING = '%llguidance {"no_forcing": true}'  # the last one counts, whatever a grammar says before
WHITESPACE = r"[ ]|\r?\n[ \t]{0,64}"  # as printers write JSON; without a bound some models write no end of it
TEMPERATURE = re.compile(r"^[?!]?\w[\w.-]*\[[^\]]*\btemperature\s*=", re.MULTILINE)
# Of a step: a mask that takes more work than some milliseconds ends the request; see LLParserLimits.
LIMITS: dict[str, Any] = {"step_lexer_fuel": 50_000, "step_max_items": 20_000, "max_lexer_states": 20_000}

T = TypeVar("T")


def lark_source(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's notation.

    Raises InvalidRequest: it is too large, a schema is no JSON, or a rule sets what only a request can.
    """
    if wanted.is_free:
        lark = "start: /x/"  # nobody looks at it
    elif wanted.grammar is not None:
        lark = wanted.grammar
        if TEMPERATURE.search(lark):
            words = "structured_outputs.grammar: a rule cannot have a temperature: set that of the request"
            raise InvalidRequest(words, wanted.param)
    elif wanted.regex is not None:
        lark = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"]
    elif wanted.choice is not None:
        lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in wanted.choice)
    else:
        lark = f"start: %json {_schema(wanted)}"
    if len(lark) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"{wanted.param} is too large: {len(lark)} characters as a grammar, of at most {MAX_GRAMMAR}", wanted.param
        )
    return f"{lark}\n{NO_FORCING}\n"


def _schema(wanted: StructuredOutputs) -> str:
    schema = {"type": "object"} if wanted.json is None else wanted.json
    options: dict[str, Any] = {"lenient": not wanted.strict, "whitespace_flexible": not wanted.disable_any_whitespace}
    if not wanted.disable_any_whitespace:
        options["whitespace_pattern"] = wanted.whitespace_pattern or WHITESPACE
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            own: Any = schema.get("x-guidance", {})
            schema = schema | {"x-guidance": options | own if isinstance(own, dict) else own}
        elif schema is not False:
            raise InvalidRequest(f"{wanted.param}: a JSON schema is an object, true or false", wanted.param)
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest(f"{wanted.param}: the schema is nested too deeply", wanted.param) from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{wanted.param}: the schema is not valid JSON: {error}", wanted.param) from None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What matchers must know of a model's tokens: the bytes of each id, and of a spare one behind them.

    Special ids have no text that a grammar could ask for, but can be named in it. Where a model has no end id, the
    spare one stands for the end.
    """

    texts: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @staticmethod
    def of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """A tokenizer's, cut or filled up to the model's size."""
        spell = tokenizer.token_bytes or _spell_beside(tokenizer.copy_backend())
        texts = [*map(spell, range(vocab_size)), b"<end>"]
        ends = [token_id for token_id in tokenizer.end_ids if token_id < vocab_size] or [vocab_size]
        special = {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
        return Vocabulary(texts, sorted(special.union(ends, [vocab_size])), ends)

    def tokenizer(self) -> LLTokenizer:
        """As llguidance has it, with what it needs for strings of JSON worked out."""
        slices = LLTokenizer.json_slices()
        return LLTokenizer(TokenizerWrapper(_Tokens(self)), len(self.texts), self.end_ids, slices)


class _Tokens:
    """A vocabulary under the names that llguidance looks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = vocabulary.texts, vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked for forced text only, of which there is none


def _spell_beside(backend: Backend) -> Callable[[int], bytes]:
    """The bytes of ids that only decode in lists: what each adds to the text of another one."""
    anchor = next(i for i in range(backend.get_vocab_size()) if re.fullmatch("[a-z]+", backend.decode([i])))
    before = backend.decode([anchor])

    def spell(token_id: int) -> bytes:
        text = backend.decode([anchor, token_id], skip_special_tokens=False)
        return b"" if "\ufffd" in text or not text.startswith(before) else text[len(before) :].encode()

    return spell


def compile_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the beginning, with its first mask at hand; `is_error` if the grammar cannot be used."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False, **LIMITS))
    matcher.compute_bitmask()
    return matcher


class Compiled(Generic[T]):
    """What `work` makes of grammars, one after another, on a thread; what was asked for last is kept.

    One that has waited for over `patience` seconds for others fails with Overloaded. Failures are kept for a while.
    """

    def __init__(self, work: Callable[[str], T], patience: float = math.inf) -> None:
        self._work, self._patience = work, patience
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._lock = threading.Lock()  # in a scheduler process both the loop and the device's thread ask
        self._kept: OrderedDict[str, tuple[Future[T], float]] = OrderedDict()  # and when they were begun
        self._size = 0  # characters of all sources

    def start(self, wanted: StructuredOutputs, worn: object = None) -> Future[T]:
        """Begin, unless it is done or begun, and not `worn`. Raises as `lark_source`."""
        source, now = lark_source(wanted), time.monotonic()
        with self._lock:
            future, begun = self._kept.get(source, (None, now))
            if future in (None, worn) or (future.done() and _is_stale(future.exception(), now - begun)):
                before = threading.stack_size(STACK_BYTES)
                future = self._thread.submit(self._run, source, now)
                threading.stack_size(before)
                self._size += 0 if source in self._kept else len(source)
                self._kept[source] = future, now
            self._kept.move_to_end(source)
            while len(self._kept) > MAX_KEPT or self._size > MAX_KEPT_SIZE:
                self._size -= len(self._kept.popitem(last=False)[0])
        return future

    def _run(self, source: str, since: float) -> T:
        if time.monotonic() - since > self._patience:
            raise Overloaded("too many grammars wait to be compiled; try again later")
        return self._work(source)

    def close(self) -> None:
        """End the thread, once its present work is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_stale(error: BaseException | None, age: float) -> bool:
    """Whether a failure is not to be told again."""
    return isinstance(error, Overloaded) or (error is not None and age > FAILURE_SECONDS)


class Matchers:
    """Matchers for requests, in the process that draws; `load` tells the vocabulary when the first one is asked for.

    Grammars come here once `text.grammar_check` has let them pass.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._tokenizer: LLTokenizer | None = None
        self._compiled: Compiled[LLMatcher] = Compiled(self._compile)
        self.end_ids: list[int] = []
        self._texts: list[bytes] = []

    def start(self, wanted: StructuredOutputs) -> Future[LLMatcher]:
        """Begin to compile; see `Compiled.start`."""
        return self._compiled.start(wanted)

    def make(self, wanted: StructuredOutputs, worn: object = None, /) -> tuple[LLMatcher | ThoughtMatcher, object]:
        """One of its own for a request, and what it is a copy of, which is not `worn`.

        Copies share the states of their lexer, whose number is limited. Waits if the grammar is not compiled.
        """
        future = self._compiled.start(wanted, worn)
        compiled = future.result()
        if wanted.thoughts is None:
            return compiled.deep_copy(), future
        inner = None if wanted.is_free else compiled.deep_copy()
        return ThoughtMatcher(inner, wanted.thoughts, self._texts, self.end_ids), future

    def close(self) -> None:
        """See `Compiled.close`."""
        self._compiled.close()

    def _compile(self, source: str) -> LLMatcher:
        if self._tokenizer is None:
            vocabulary = self._load()
            self._tokenizer, self.end_ids = vocabulary.tokenizer(), vocabulary.end_ids
            self._texts = vocabulary.texts
        return compile_matcher(self._tokenizer, source)
