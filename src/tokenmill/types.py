"""The vocabulary of requests: sampling parameters, finish reasons, usage. Validated here and nowhere else."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence, Sized
from typing import Any, Literal

import msgspec

from tokenmill.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_STOP_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_IDS = 32
MAX_ALLOWED_IDS = 2**16
MAX_IDS_IN_ALL = 2**18  # of all choices: each has its own, and others wait while they are read
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_NAME = 512
MAX_GRAMMAR = 256 * 1024  # characters
MAX_GRAMMARS_IN_ALL = 2**24  # characters, of all answers: each has its own
MAX_TEXTS = 16384  # that an output may be one of
SEED_BITS = 63
MAX_INT32 = 2**31 - 1

Pooling = Literal["last", "mean"]


class FinishReason(enum.StrEnum):
    """Why a request ended. The values are those of the HTTP API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request. The end token counts as generated."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Scheduling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request is treated beside others; nothing of it changes its tokens.

    Args:
        priority: larger is more important.
        deadline: when it must have ended, in milliseconds of `clock.milliseconds`; None is never.
        tenant: whose request it is, for the fair policy.
        salt: only requests of the same salt share K/V.

    Raises InvalidRequest when a value is out of range; `param` names the field of the HTTP API.
    """

    priority: int = 0
    deadline: int | None = None
    tenant: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        check_whole("priority", self.priority, -MAX_INT32, MAX_INT32)
        for name, value in (("user", self.tenant), ("cache_salt", self.salt)):
            if not isinstance(value, str) or len(value) > MAX_NAME:
                raise InvalidRequest(f"{name} must be a string of at most {MAX_NAME} characters", name)


def deadline_from(now: int, deadline_ms: object = None, timeout: object = None) -> int | None:
    """When `deadline_ms` milliseconds, or `timeout` seconds, have passed since `now`; None when neither is given.

    Raises InvalidRequest: a value is out of range, or the two differ.
    """
    if deadline_ms is not None:
        check_whole("deadline_ms", deadline_ms, 1, MAX_INT32)
    if timeout is not None:
        check_number("timeout", timeout, 0.001, MAX_INT32 // 1000)
        milliseconds = round(1000 * timeout)  # type: ignore[operator]
        if deadline_ms not in (None, milliseconds):
            raise InvalidRequest("deadline_ms and timeout differ: set only one", "timeout")
        deadline_ms = milliseconds
    return None if deadline_ms is None else now + deadline_ms  # type: ignore[operator]


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely the model finds a token, before anything changes its logits.

    `data` are the token's bytes, and `text` what they spell. `logprob` is natural, and None of a prompt's first token;
    `rank` is 1 for the likeliest.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float | None
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """A token of the prompt or the output, and the likeliest at its place.

    `offset` is where it begins in the text, in characters, behind an echoed prompt.
    """

    token: Logprob
    top: list[Logprob]
    offset: int


class Thoughts(msgspec.Struct, frozen=True):
    """What may come before the output proper. Ids are of the tags; without a start, the prompt has begun them.

    After `budget` tokens, if it is not None, the end tag is forced.
    """

    start: list[int]
    end: list[int]
    budget: int | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the whole output must be; exactly one of the first five fields says it, or none where there are thoughts.

    Args:
        json: a value that this JSON schema allows; the schema itself, or its text.
        json_object: any JSON object.
        regex: a text that this pattern matches from its beginning to its end.
        choice: one of these texts.
        grammar: a text of this grammar, in the notation that llguidance has made of Lark's.
        strict: refuse what a schema asks for and cannot be enforced; otherwise such parts of it are not looked at.
        whitespace_pattern: what may stand between the parts of JSON, besides nothing.
        disable_any_whitespace: nothing may stand between the parts of JSON.
        param: the field of the request that errors name.
        thoughts: come first, and are free.

    Raises InvalidRequest when a field is of a wrong kind, too large, or one too many.
    """

    json: dict[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    strict: bool = True
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    param: str = "structured_outputs"
    thoughts: Thoughts | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "strict", "disable_any_whitespace"):
            self._check(isinstance(getattr(self, name), bool), f"{name} must be true or false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._check(isinstance(getattr(self, name), str | None), f"{name} must be a string")
        self._check(isinstance(self.json, dict | str | bool | None), "json must be a JSON schema, or its text")
        is_list = isinstance(self.choice, list | tuple) and all(isinstance(text, str) for text in self.choice)
        self._check(self.choice is None or (is_list and len(self.choice) > 0), "choice must be a list of strings")
        self._check(len(self.choice or ()) <= MAX_TEXTS, f"choice holds at most {MAX_TEXTS} strings")
        given = [kind for kind in (self.json, self.regex, self.choice, self.grammar) if kind is not None]
        is_one = len(given) + self.json_object == 1
        self._check(
            is_one or (self.thoughts is not None and self.is_free),
            "takes exactly one of json, json_object, regex, choice and grammar",
        )

    @property
    def is_free(self) -> bool:
        """Whether anything may come, after thoughts."""
        return (self.json, self.regex, self.choice, self.grammar) == (None,) * 4 and not self.json_object

    @property
    def size(self) -> int:
        """Characters, about."""
        parts = self.json, self.regex, self.grammar, *(self.choice or ())
        return sum(len(part) if isinstance(part, str) else len(repr(part)) for part in parts)

    def _check(self, is_right: bool, words: str) -> None:
        if not is_right:
            raise InvalidRequest(f"{self.param}: {words}", self.param)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw and when to stop, for one prompt.

    Args:
        max_tokens: most tokens to generate; None is all that the context leaves, 0 only computes the prompt.
        min_tokens: no end token, stop id or stop string before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens up to this share of probability.
        min_p: drop tokens less likely than this share of the likeliest one's probability.
        seed: makes the draw repeatable; None lets the server choose.
        n: choices for the prompt.
        stop: text that ends the output.
        stop_token_ids: ids that end the output besides the model's own end ids.
        ignore_eos: do not end at the model's end ids.
        include_stop_str_in_output: keep the stop text, or the stop token's text, in the output.
        skip_special_tokens: leave special tokens out of the text.
        logit_bias: added to the logits of these ids, -100 to 100.
        allowed_token_ids: only these are drawn; None is all.
        bad_words: texts, or sequences of token ids, that are not generated while there is anything else to draw.
        logprobs: give the logprob of each token drawn, and of so many of the likeliest, as the model finds them.
        prompt_logprobs: the same of each token of the prompt but the first.
        pooling: give the prompt's embedding: the final state of its last token, or the mean over all, of length 1.
        presence_penalty: taken from the logits of ids in the output, -2 to 2.
        frequency_penalty: taken from the logits of ids for each time that they are in the output, -2 to 2.
        repetition_penalty: logits of ids in the prompt or the output are divided by it if positive, else multiplied.
        structured_outputs: what the whole output must be; then it ends when nothing more can follow, also with
            ignore_eos, and min_tokens does not keep it from that.

    Raises InvalidRequest when a value is out of range; `param` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 0, MAX_INT32)
        check_whole("min_tokens", self.min_tokens, 0, MAX_INT32)
        check_number("temperature", self.temperature, 0, 100)
        check_whole("top_k", self.top_k, -1, MAX_INT32)
        check_number("top_p", self.top_p, 0, 1)
        check_number("min_p", self.min_p, 0, 1)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_whole("n", self.n, 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.pooling not in (None, "last", "mean"):
            raise InvalidRequest(f"pooling must be last or mean, not {self.pooling!r}", "pooling")
        if self.seed is not None:
            check_whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})", "min_tokens")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise InvalidRequest("structured_outputs must be StructuredOutputs", "structured_outputs")
        self._check_stops()
        self._check_bias()
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids is empty: leave it out to allow all", "allowed_token_ids")
        self._check_bad_words()
        if self.n * (len(self.allowed_token_ids or ()) + sum(map(len, self.bad_sequences))) > MAX_IDS_IN_ALL:
            held = f"allowed_token_ids and bad_words hold over {MAX_IDS_IN_ALL} ids, n times"
            raise InvalidRequest(f"{held}: send several requests", "n")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also when one string was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature < 1e-4 or self.top_k == 1

    @property
    def is_penalised(self) -> bool:
        """Whether what is in the prompt or the output changes a token's logit."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def bad_sequences(self) -> list[Sequence[int]]:
        """Those of `bad_words` that are ids; when a request runs, all are."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every position of the prompt must be computed, also those whose K/V is cached."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def needs_history(self) -> bool:
        """Whether the engine must know the tokens so far, for more than the model."""
        has_sequences = any(len(ids) > 1 for ids in self.bad_sequences)
        others = self.prompt_logprobs, self.structured_outputs
        return self.is_penalised or has_sequences or others != (None, None)

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of one of `n` choices: a seed of its own, and n = 1.

        A request without a seed gets a random one here, so that nothing below draws randomness.
        """
        seed = secrets.randbits(SEED_BITS) if self.seed is None else self.seed
        return msgspec.structs.replace(self, seed=(seed + index) % 2**SEED_BITS, n=1)

    def _check_stops(self) -> None:
        if not isinstance(self.stop, str | list | tuple):
            raise InvalidRequest("stop must be a string or a list of strings", "stop")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise InvalidRequest("stop must hold non-empty strings only", "stop")
        _at_most("stop", self.stop_strings, MAX_STOP_STRINGS, "strings")
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
        _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIAS, "ids")
        for token, bias in self.logit_bias.items():
            check_whole("logit_bias", token, 0, MAX_INT32)
            check_number("logit_bias", bias, -100, 100)

    def _check_bad_words(self) -> None:
        if not isinstance(self.bad_words, list | tuple) or not all(self.bad_words):
            raise InvalidRequest("bad_words must be a list of texts, or of token ids, none of them empty", "bad_words")
        _at_most("bad_words", self.bad_words, MAX_BAD_WORDS, "sequences of ids")
        for word in self.bad_words:
            if not isinstance(word, str):
                _check_ids("bad_words", word, MAX_BAD_IDS)
            elif not word.strip():
                raise InvalidRequest("bad_words must hold more than spaces", "bad_words")


def _check_ids(name: str, ids: object, most: int) -> None:
    if not isinstance(ids, list | tuple):
        raise InvalidRequest(f"{name} must be a list of token ids", name)
    _at_most(name, ids, most, "ids")
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_INT32:
            check_whole(name, token, 0, MAX_INT32)


def _at_most(name: str, values: Sized, most: int, what: str) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{name} holds at most {most} {what}", name)


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raises InvalidRequest, naming the field, unless the value is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", name)
    check_number(name, value, least, most)


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raises InvalidRequest, naming the field, unless the value is a number from `least` to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, not {value!r}", name)
    if not least <= value <= most:
        raise InvalidRequest(f"{name} must be from {least} to {most}, not {value}", name)
