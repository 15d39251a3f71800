"""Every message that crosses a process border. msgspec structs, tagged by name, encoded as msgpack.

Token ids travel as int32 bytes (`pack_ids`, `unpack_ids`), results as columns. Who sends what to whom:

    API server  -- Limits, TokenizeJob, CacheCall, TextCall, Abort --> tokenizer worker k  (a pipe each, in order)
    tokenizer   -- GenerateJob, CacheCall, Abort --> scheduler  (an Abort follows its job and cannot overtake it)
    tokenizer   -- Tokenized, Refused, CallAnswer --> API server
    API server  -- Abort, Probe, CacheCall --> scheduler        (Abort only after the job is known to have arrived)
    rank 0      -- Tick, and all that it received --> other ranks
    scheduler   -- OpenText, TokenBatch -> detokenizer          (OpenText before the request's first token)
    scheduler   -- Pulse, CallAnswer -----> API server
    detokenizer -- TextBatch -----------> API server
    detokenizer -- Abort ---------------> scheduler             (a stop string was found)
    main        -- Farewell ------------> API server            (where there are several)
    API server  -- CancelCall, CallAnswer -> API server

Of several API servers, number i gives only uids and serials that are i modulo their number: so answers find their way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.types import FinishReason, SamplingParams, Scheduling, TokenLogprobs

CacheVerb = Literal["stats", "probe", "pin", "unpin", "flush", "tree"]


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return array("i", token_ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The token ids of `pack_ids`."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error that a client can be shown: the fields of OpenAI's error object, HTTP status, seconds to try again."""

    message: str
    kind: str = "InternalServerError"
    status: int = 500
    param: str | None = None
    retry_after: int = 1


def error_info(error: TokenmillError) -> ErrorInfo:
    """What another process is told of an error."""
    retry_after = error.retry_after if isinstance(error, Overloaded) else 1
    return ErrorInfo(error.message, error.kind, error.status, error.param, retry_after)


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Chat messages before the template: `messages` are checked OpenAI-shaped dicts.

    `thought_tags` are what stands before and after thoughts, if anything; after `thinking_token_budget` tokens of them
    the second is forced. Special tokens of `shown_ids` are shown in
    the output's text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    thought_tags: list[str] = []
    thinking_token_budget: int | None = None
    shown_ids: list[int] = []


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the engine can hold, in tokens; sent to every tokenizer worker before the first job.

    Without `has_output` the model makes embeddings only.
    """

    max_model_len: int
    vocab_size: int
    has_output: bool = True


class TokenizeJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One prompt to be tokenized and generated from; exactly one of `text`, `token_ids`, `chat` is set.

    `echo` puts the prompt's text before the output's. `uids` has one request a choice; choice i has
    `params.for_choice(i)` and they share the prompt.
    """

    uids: list[int]
    params: SamplingParams
    text: str | None = None
    token_ids: bytes | None = None
    chat: ChatPrompt | None = None
    echo: bool = False
    scheduling: Scheduling = Scheduling()


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the detokenizer must know of a request.

    Of special tokens that are skipped, `shown_ids` are shown all the same. `prompt_tail` are the prompt's last few ids
    as context for the first token (int32 bytes). With `echo_text` or `echo_ids` the prompt is put before the output;
    stop strings do not look at it. `logprobs` and `prompt_logprobs` are as in SamplingParams, and `prompt_ids` what the
    latter are of. With `is_prompt_only` no output is shown.
    """

    stop: list[str] = []
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_ids: list[int] = []
    prompt_tail: bytes = b""
    echo_text: str | None = None
    echo_ids: bytes | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_ids: bytes = b""
    is_prompt_only: bool = False


class GenerateJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One request for the scheduler. `end_ids` are the model's; with `ignore_eos` empty, unless there is a grammar.

    `max_tokens` is resolved: never None. `text` is handed on to the detokenizer unread.
    """

    uid: int
    token_ids: bytes
    params: SamplingParams
    max_tokens: int
    end_ids: list[int]
    text: TextOptions
    scheduling: Scheduling = Scheduling()


class Tokenized(msgspec.Struct, frozen=True, tag=True):
    """A TokenizeJob became GenerateJobs; `prompt_tokens` is counted once a prompt. `is_thinking`: thoughts end it."""

    uids: list[int]
    prompt_tokens: int
    is_thinking: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A TokenizeJob cannot be honoured; none of its requests was started."""

    uids: list[int]
    error: ErrorInfo


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests in whatever state they are. Unknown or finished ones: nothing happens."""

    uids: list[int]


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Asks the scheduler for a Pulse with the same serial, answered between steps."""

    serial: int


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The scheduler's state at one moment; answers a Probe.

    Of several ranks, `ranks` has each one's turns so far, and the bytes of memory that it took at its start.
    """

    serial: int
    steps: int
    waiting: int
    running: int
    free_pages: int
    cached_pages: int
    num_pages: int
    available_pages: int = 0  # free, or cached and in no request's use
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    ranks: list[tuple[int, int]] = []


class Tick(msgspec.Struct, frozen=True, tag=True):
    """The time of a turn, in milliseconds of rank 0's clock: the first of the messages that all ranks take in."""

    now: int


class CacheCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks the prefix cache for something, answered between steps by a CallAnswer with the same serial.

    probe, pin and unpin are about a prompt. As `text` or `chat` it goes through a tokenizer, which puts `token_ids` in
    its place. A pin lasts `ttl` milliseconds. flush forgets one `salt`, or with None all of them, and what is pinned
    only `with_pins`. tree gives at most `max_nodes` nodes of `max_depth` levels.
    """

    serial: int = 0
    verb: CacheVerb
    text: str | None = None
    token_ids: bytes | None = None
    chat: ChatPrompt | None = None
    salt: str | None = None
    ttl: int = 0
    with_pins: bool = False
    max_nodes: int = 0
    max_depth: int = 0


class TextCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks a tokenizer for the ids of `text` or `chat`, or the text of `token_ids`; answered by a CallAnswer.

    `with_strings` asks for each id's own string too.
    """

    serial: int = 0
    text: str | None = None
    chat: ChatPrompt | None = None
    token_ids: bytes | None = None
    add_special_tokens: bool = True
    with_strings: bool = False


class CallAnswer(msgspec.Struct, frozen=True, tag=True):
    """What came of a CacheCall or TextCall: data for JSON, or an error."""

    serial: int
    data: dict[str, Any] = {}
    error: ErrorInfo | None = None


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Has another API server end the requests of this name; answered to `sender` by a CallAnswer with how many."""

    serial: int
    sender: int
    name: str


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The server is ending: requests that are open get `grace` seconds, and then this error."""

    grace: float
    error: ErrorInfo


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the loop that reads this, at once. Processes are ended by SIGTERM."""


class OpenText(msgspec.Struct, frozen=True, tag=True):
    """Sent to the detokenizer before the first token of a request."""

    uid: int
    options: TextOptions


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request as the scheduler sees it. `stop_token` is the id that matched; None for an end id."""

    uid: int
    reason: FinishReason
    is_stop_token: bool = False
    stop_token: int | None = None
    error: ErrorInfo | None = None


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """When a request entered the queue, when its first step was planned, and when its first and last token came.

    In milliseconds of `clock.milliseconds`, by the scheduler process; what never was is when the request ended.
    """

    queued: int
    began: int
    first: int
    last: int


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of a step, as columns.

    Row i is request `uids[i]` with `counts[i]` new ids, one after another in `token_ids`. `accepted` are requests
    that entered the queue. `admitted` are (uid, cached tokens), sent with or before the request's first token, as
    `began` is: (uid, when its first step was planned). `now` is when this was sent.
    `finished` applies after the rows. A finishing stop token is in the rows; `Finish.is_stop_token` says so.
    `logprobs` are records of a request's new ids, `prompt_logprobs` of its prompt's from a position on: int32 bytes, a
    token's logprob (as float32's bits) and rank, then id and logprob of as many of the likeliest as it asked for.
    `embeddings` are float32 bytes, with the token that follows the prompt.
    """

    uids: list[int] = []
    counts: list[int] = []
    token_ids: bytes = b""
    accepted: list[int] = []
    admitted: list[tuple[int, int]] = []
    began: list[tuple[int, int]] = []
    now: int = 0
    finished: list[Finish] = []
    logprobs: dict[int, bytes] = {}
    prompt_logprobs: dict[int, tuple[int, bytes]] = {}
    embeddings: dict[int, bytes] = {}


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new of one request: text, token count so far, and the end if it ended.

    `completion_tokens` is the total up to the end of `text`. `stop_reason` is the stop string or id that matched.
    `token_ids` are the ids of this delta (int32 bytes), without those after a stop string. `timings` come with the end.
    `logprobs`, where asked for, come with the text that their tokens begin, those of the prompt before any text.
    An `embedding`, float32 bytes, comes with the end.
    """

    uid: int
    text: str = ""
    token_ids: bytes = b""
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None
    timings: Timings | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""


class TextBatch(msgspec.Struct, frozen=True, tag=True):
    """Deltas of one or more requests, for the API server."""

    deltas: list[TextDelta]


ToTokenizer = Limits | TokenizeJob | CacheCall | TextCall | Abort | Stop
ToScheduler = GenerateJob | CacheCall | Abort | Probe | Tick | Stop
ToDetokenizer = OpenText | TokenBatch | Stop
ToServer = Tokenized | Refused | TextBatch | Pulse | CallAnswer | CancelCall | Farewell
