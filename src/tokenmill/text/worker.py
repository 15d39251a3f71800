"""The tokenizer and detokenizer processes: pure stages that map messages to messages, and the loops around them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from tokenmill.clock import milliseconds
from tokenmill.errors import ConfigError, DeadlinePassed, InvalidRequest, RequestTooLong, TokenmillError
from tokenmill.procs import Report
from tokenmill.text.chat import encode_chat
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.detokenizer_stage import DetokenizerStage
from tokenmill.text.dialect import find_dialect
from tokenmill.text.grammar import Vocabulary
from tokenmill.text.grammar_check import GrammarCheck
from tokenmill.text.grammar_gate import GrammarGate
from tokenmill.text.settings import TextSettings
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import SamplingParams, StructuredOutputs, Thoughts
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import PullChannel, PushChannel, Receiver, Sender, ServerChannel, address
from tokenmill.wire.messages import ToDetokenizer, ToScheduler, ToServer, ToTokenizer

PROMPT_TAIL = 8

logger = logging.getLogger(__name__)


def load_template(tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate | None:
    """The template in `file`, else the model's own, else None.

    Raises ConfigError when the file cannot be read, and ModelUnreadable when the template is not valid.
    """
    source = tokenizer.chat_template
    if file is not None:
        try:
            source = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


class TokenizerStage:
    """TokenizeJob to GenerateJobs. `limits` must be set before the first job."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: wire.Limits | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.limits = limits
        self.grammars = GrammarCheck(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))

    def process(self, job: wire.TokenizeJob) -> tuple[list[wire.GenerateJob], wire.Tokenized | wire.Refused]:
        """One GenerateJob a choice and a Tokenized; or none and a Refused. Never raises for what a job holds."""
        try:
            assert self.limits is not None, "Limits come before the first job"
            token_ids = self._prompt_ids(job, self.limits)
            jobs = self._generate_jobs(job, token_ids, self.limits)
        except Exception as error:
            return [], wire.Refused(job.uids, _failure(error))
        return jobs, wire.Tokenized(job.uids, len(token_ids), self._is_thinking(job.chat, token_ids))

    def answer(self, call: wire.CacheCall | wire.TextCall) -> wire.CacheCall | wire.CallAnswer:
        """A cache call with its prompt as ids; the ids of a text, also of none, or the text of ids; or why not."""
        try:
            assert self.limits is not None, "Limits come before the first call"
            if isinstance(call, wire.TextCall):
                return wire.CallAnswer(call.serial, self._answer(call, self.limits))
            return replace(call, text=None, chat=None, token_ids=wire.pack_ids(self._prompt_ids(call, self.limits)))
        except Exception as error:
            return wire.CallAnswer(call.serial, error=_failure(error))

    def _answer(self, call: wire.TextCall, limits: wire.Limits) -> dict[str, Any]:
        check_length = partial(self._check_length, limits.max_model_len, "messages" if call.chat else "prompt")
        if call.token_ids is not None:
            token_ids = wire.unpack_ids(call.token_ids)
            _check_ids(token_ids, limits.vocab_size, "tokens")
            return {"prompt": self._tokenizer.decode(token_ids, skip_special_tokens=False)}
        if call.chat is not None:
            token_ids = encode_chat(self._tokenizer, self._template, call.chat, check_length)
        else:
            check_length(call.text or "")
            token_ids = self._tokenizer.encode(call.text or "", add_special_tokens=call.add_special_tokens)
        strings = [self._tokenizer.token_string(token_id) for token_id in token_ids] if call.with_strings else None
        found = {"count": len(token_ids), "max_model_len": limits.max_model_len, "tokens": token_ids}
        return found | {"token_strs": strings}

    def _prompt_ids(self, job: wire.TokenizeJob | wire.CacheCall, limits: wire.Limits) -> list[int]:
        param = "messages" if job.chat else "prompt"
        check_length = partial(self._check_length, limits.max_model_len, param)
        if job.token_ids is not None:
            token_ids = wire.unpack_ids(job.token_ids)
        elif job.text is not None:
            check_length(job.text)
            token_ids = self._tokenizer.encode(job.text)
        elif job.chat is not None:
            token_ids = encode_chat(self._tokenizer, self._template, job.chat, check_length)
        else:
            raise InvalidRequest("a request needs a prompt", "prompt")
        if not token_ids:
            raise InvalidRequest("the prompt is empty: it has no tokens", param)
        _check_ids(token_ids, limits.vocab_size, param)  # a tokenizer can have more tokens than its model
        return token_ids

    def _is_thinking(self, chat: wire.ChatPrompt | None, token_ids: list[int]) -> bool:
        """Whether thoughts are begun at the prompt's end, by the template or in a message that goes on."""
        if chat is None or not chat.thought_tags:
            return False
        text = self._tail(token_ids)
        if chat.continue_final_message and isinstance(content := chat.messages[-1]["content"], str):
            text = content
        start, end = map(text.rfind, chat.thought_tags)
        return start > end

    def _check_length(self, most: int, param: str, text: str) -> None:
        """Refuse without tokenizing what cannot fit, so that one huge text does not hold up the others."""
        if len(text) > self._tokenizer.longest_text(most):
            raise RequestTooLong(
                f"This model's maximum context length is {most} tokens. However, you requested a prompt of "
                f"{len(text)} characters, which is more than that in any case. Please shorten it.",
                param,
            )

    def _generate_jobs(
        self, job: wire.TokenizeJob, token_ids: list[int], limits: wire.Limits
    ) -> list[wire.GenerateJob]:
        params = job.params
        if not limits.has_output and params.pooling is None:
            raise InvalidRequest(
                "this model has no output matrix: it makes embeddings only, at /v1/embeddings", "model"
            )
        _check_ids(params.stop_token_ids, limits.vocab_size, "stop_token_ids")
        _check_ids(params.logit_bias, limits.vocab_size, "logit_bias")
        params = self._with_bad_ids(params, limits.vocab_size)
        if len(job.uids) != params.n:
            raise InvalidRequest(f"n is {params.n}, but {len(job.uids)} choices were asked for", "n")
        _check_logprobs(params, limits.vocab_size)
        max_tokens = _max_tokens(params, len(token_ids), limits.max_model_len, "messages" if job.chat else "prompt")
        is_prompt_only = max_tokens == 0
        if is_prompt_only:
            if not job.echo and params.prompt_logprobs is None and params.pooling is None:
                raise InvalidRequest("max_tokens may be 0 only with echo or prompt_logprobs: raise it", "max_tokens")
            # The token that a prompt's last step draws is dropped: nothing may depend on it.
            nothing = {"structured_outputs": None, "logprobs": None, "stop_token_ids": ()}
            changes = {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True, **nothing}
            params, max_tokens = replace(params, **changes), 1
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs)
        if job.chat is not None and job.chat.thought_tags and not is_prompt_only:
            params = self._with_thoughts(params, job.chat, token_ids)
        never_ends = params.ignore_eos and params.structured_outputs is None
        packed = wire.pack_ids(token_ids)
        options = wire.TextOptions(
            stop=list(params.stop_strings),
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=[] if job.chat is None else job.chat.shown_ids,
            prompt_tail=wire.pack_ids(token_ids[-PROMPT_TAIL:]),
            echo_text=job.text if job.echo else None,
            echo_ids=packed if job.echo and job.text is None else None,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            prompt_ids=b"" if params.prompt_logprobs is None else packed,
            is_prompt_only=is_prompt_only,
        )
        return [
            wire.GenerateJob(
                uid=uid,
                token_ids=packed,
                params=params.for_choice(index),
                max_tokens=max_tokens,
                end_ids=[] if never_ends else [i for i in self._tokenizer.end_ids if i < limits.vocab_size],
                text=options,
                scheduling=job.scheduling,
            )
            for index, uid in enumerate(job.uids)
        ]

    def _with_thoughts(self, params: SamplingParams, chat: wire.ChatPrompt, token_ids: list[int]) -> SamplingParams:
        """The parameters with thoughts before what the output must be, unless the prompt has ended them."""
        wanted, budget = params.structured_outputs, chat.thinking_token_budget
        is_open = self._is_thinking(chat, token_ids)
        has_ended = chat.thought_tags[1] in self._tail(token_ids) and not is_open
        if has_ended or (wanted is None and budget is None):
            return params
        start, end = (self._tokenizer.encode(tag, add_special_tokens=False) for tag in chat.thought_tags)
        thoughts = Thoughts([] if is_open else start, end, budget)
        wanted = StructuredOutputs(thoughts=thoughts) if wanted is None else replace(wanted, thoughts=thoughts)
        return replace(params, structured_outputs=wanted)

    def _tail(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids[-PROMPT_TAIL:], skip_special_tokens=False)

    def _with_bad_ids(self, params: SamplingParams, vocab_size: int) -> SamplingParams:
        """The parameters with bad words as ids; raises InvalidRequest when they leave nothing to draw."""
        bad = [ids for word in params.bad_words for ids in ([word] if not isinstance(word, str) else self._spell(word))]
        for ids in bad:
            _check_ids(ids, vocab_size, "bad_words")
        if params.allowed_token_ids is not None:
            _check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
            ends = {*self._tokenizer.end_ids, *params.stop_token_ids} if params.min_tokens else set()
            if not set(params.allowed_token_ids).difference(ends, *(ids for ids in bad if len(ids) == 1)):
                raise InvalidRequest("bad_words or min_tokens forbid all of allowed_token_ids", "allowed_token_ids")
        return replace(params, bad_words=bad) if bad else params

    def _spell(self, word: str) -> list[list[int]]:
        """A word's ids, also as it stands behind others, with a space before."""
        plain, spaced = (self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        return [plain, spaced] if spaced[-len(plain) :] != plain else [plain]


def _failure(error: Exception) -> wire.ErrorInfo:
    if isinstance(error, RecursionError):
        error = InvalidRequest("the request is nested too deeply")
    if isinstance(error, TokenmillError):
        return wire.error_info(error)
    logger.error("tokenizing failed", exc_info=error)
    return wire.ErrorInfo("tokenizing failed inside the server; see its log")


def _check_ids(token_ids: Any, vocab_size: int, param: str) -> None:
    least, most = min(token_ids, default=0), max(token_ids, default=0)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise InvalidRequest(f"{param} holds the token id {wrong}; ids are from 0 to {vocab_size - 1}", param)


def _check_logprobs(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise InvalidRequest(f"{name} must be at most the model's {vocab_size} tokens", name)


def _max_tokens(params: SamplingParams, prompt_tokens: int, max_model_len: int, prompt_param: str) -> int:
    """`max_tokens`, or what the context leaves; raises RequestTooLong when it leaves too little."""
    limit = f"This model's maximum context length is {max_model_len} tokens. However, you requested"
    left = max_model_len - prompt_tokens
    if left < 1:
        raise RequestTooLong(
            f"{limit} a prompt of {prompt_tokens} tokens, which leaves no room for an answer. Please shorten it.",
            prompt_param,
        )
    if params.max_tokens is not None and params.max_tokens > left:
        raise RequestTooLong(
            f"{limit} {prompt_tokens + params.max_tokens} tokens ({prompt_tokens} in the prompt, {params.max_tokens} "
            "for the answer). Please shorten the prompt or lower max_tokens.",
            "max_tokens",
        )
    if params.min_tokens > left:
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, but the context leaves {left} tokens", "min_tokens")
    return left if params.max_tokens is None else params.max_tokens


def tokenizer_loop(
    stage: TokenizerStage, inbox: Receiver[ToTokenizer], scheduler: Sender[ToScheduler], server: Sender[ToServer]
) -> None:
    """Work through the inbox, at most until Stop. Every job is answered, also one whose Abort is there already."""
    queue: deque[ToTokenizer] = deque()
    aborted: set[int] = set()
    while True:
        arrived = inbox.receive(0 if queue else None)
        if any(isinstance(message, wire.Stop) for message in arrived):
            return
        aborted.update(uid for message in arrived if isinstance(message, wire.Abort) for uid in message.uids)
        queue.extend(arrived)
        match queue.popleft() if queue else None:
            case wire.Limits() as limits:
                stage.limits = limits
            case wire.TokenizeJob() as job if aborted.issuperset(job.uids):
                server.send(wire.Refused(job.uids, wire.ErrorInfo("aborted before it was tokenized", status=499)))
            case wire.TokenizeJob() as job if (job.scheduling.deadline or math.inf) <= milliseconds():
                server.send(wire.Refused(job.uids, wire.error_info(DeadlinePassed())))
            case wire.TokenizeJob() as job:
                jobs, answer = stage.process(job)
                server.send(answer)
                for generate in jobs:
                    scheduler.send(generate)
            case wire.CacheCall() | wire.TextCall() as call:
                answered = stage.answer(call)
                if isinstance(answered, wire.CacheCall):
                    scheduler.send(answered)
                else:
                    server.send(answered)
            case wire.Abort() as abort:
                aborted.difference_update(abort.uids)
                scheduler.send(abort)


def detokenizer_loop(
    stage: DetokenizerStage, inbox: Receiver[ToDetokenizer], scheduler: Sender[ToScheduler], server: Sender[ToServer]
) -> None:
    """Turn what the scheduler sends into text, at most until Stop."""
    while True:
        for message in inbox.receive():
            if isinstance(message, wire.Stop):
                return
            batch, aborts = stage.process(message)
            if aborts:
                scheduler.send(wire.Abort(aborts))
            if batch is not None:
                server.send(batch)


def run_tokenizer(settings: TextSettings, report: Report) -> None:
    """A tokenizer process: load, report, work. Raises TokenmillError when the model cannot be used."""
    tokenizer = Tokenizer.load(settings.model, or_bytes=settings.or_bytes)
    template = load_template(tokenizer, settings.chat_template)
    parsers = settings.tool_parser, settings.reasoning_parser
    dialect = find_dialect(template.source if template else "", tokenizer.special_texts, *parsers)
    with _channels(settings, ToTokenizer) as channels:
        report.ready(
            sampling_defaults=tokenizer.sampling_defaults,
            dialect=dialect,
            pooling=tokenizer.pooling,
            num_own_tokens=0 if settings.or_bytes else tokenizer.num_own_tokens,
        )
        inbox, scheduler, server = channels
        stage = TokenizerStage(tokenizer, template)
        tokenizer_loop(stage, GrammarGate(inbox, stage.grammars.start), scheduler, server)


def run_detokenizer(settings: TextSettings, report: Report) -> None:
    """The detokenizer process: load, report, work. Raises TokenmillError when the model cannot be used."""
    tokenizer = Tokenizer.load(settings.model, or_bytes=settings.or_bytes)
    with _channels(settings, ToDetokenizer) as channels:
        report.ready()
        detokenizer_loop(DetokenizerStage(tokenizer), *channels)


@contextmanager
def _channels(
    settings: TextSettings, kind: Any
) -> Iterator[tuple[PullChannel[Any], PushChannel[ToScheduler], ServerChannel]]:
    directory = settings.directory
    with (
        zmq.Context() as context,
        closing(PullChannel[Any](context, address(directory, settings.name), kind)) as inbox,
        closing(PushChannel[ToScheduler](context, address(directory, "scheduler"))) as scheduler,
        closing(ServerChannel(context, directory, settings.api_workers)) as server,
    ):
        yield inbox, scheduler, server
