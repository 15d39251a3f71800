"""Offline use: the whole pipeline in one process, without sockets."""

from __future__ import annotations

import dataclasses
import sys
import time
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenmill.clock import milliseconds
from tokenmill.config import DEFAULT_MODEL, ModelConfig, RunConfig
from tokenmill.engine.load import load_engine
from tokenmill.errors import ConfigError, InvalidRequest, RankLost, TokenmillError, UnsupportedField
from tokenmill.hub import resolve_model
from tokenmill.procs import interrupts_held
from tokenmill.text.detokenizer_stage import DetokenizerStage
from tokenmill.text.grammar import Matchers, Vocabulary
from tokenmill.text.grammar_gate import GrammarGate
from tokenmill.text.prompts import Message, Prompt, is_ids, tokenize_job
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.worker import TokenizerStage, load_template
from tokenmill.trace import Tracer
from tokenmill.types import FinishReason, Pooling, SamplingParams, Scheduling, TokenLogprobs, Usage, deadline_from
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import MemoryChannel, NullSender
from tokenmill.worker.core import make_core
from tokenmill.worker.followers import Followers
from tokenmill.worker.inbox import LeaderInbox
from tokenmill.worker.loop import make_loop

PROGRESS_FROM = 8


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. `stop_reason` is the stop string or id that matched, None for the model's own end.

    `logprobs` are there if the parameters ask for them, and end where the text does.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt: `params.n` choices. `first_token_at` is a time of `time.perf_counter`.

    `prompt_logprobs` has an entry for each token of the prompt, if the parameters ask for them; `embedding` is float32
    bytes, if they ask for one.
    """

    choices: list[Completion]
    usage: Usage
    first_token_at: float | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(slots=True)
class _Request:
    """What has come of a request that is not forgotten yet."""

    prompt_tokens: int
    deltas: deque[wire.TextDelta] = field(default_factory=deque)
    first_token_at: float | None = None


class LLM:
    """A model to generate from in this process. Use it as a context manager, or call `close`.

    Args:
        model: what ``tokenmill serve`` takes: alias, folder, .gguf file, or hub id; or a whole configuration.
        options: any field of ModelConfig, EngineConfig or SchedulerConfig, such as `page_size` or `dtype`. The queue
            is bounded by `max_waiting` alone, since the caller holds all prompts anyway. `tp` is also taken as
            `tensor_parallel_size`; over 1, it starts processes, which import the caller's main module anew: what that
            does must stand under ``if __name__ == "__main__"``.

    Raises:
        TokenmillError: the model cannot be found or read, or an option cannot work.
    """

    def __init__(self, model: str | Path | RunConfig = DEFAULT_MODEL, **options: Any) -> None:
        run = _run_config(model, options)
        is_random = run.model.random_weights
        path = resolve_model(run.model.model, needs_weights=not is_random)
        tokenizer = Tokenizer.load(path, or_bytes=is_random)
        template = load_template(tokenizer, Path(run.model.chat_template) if run.model.chat_template else None)
        self._matchers = Matchers(lambda: Vocabulary.of(tokenizer, spec.vocab_size))
        num_tokens = 0 if is_random else tokenizer.num_own_tokens
        self._followers = Followers()
        load = partial(load_engine, run, path, matchers=self._matchers, num_tokens=num_tokens)
        self._engine, config, spec = self._followers.start(run, path, load)
        limits = wire.Limits(max_model_len=config.max_model_len, vocab_size=spec.vocab_size, has_output=spec.has_output)
        self._tokenizer_stage = TokenizerStage(tokenizer, template, limits)
        self._detokenizer_stage = DetokenizerStage(tokenizer)
        self._to_scheduler: MemoryChannel[wire.ToScheduler] = MemoryChannel()
        self._to_detokenizer: MemoryChannel[wire.ToDetokenizer] = MemoryChannel()
        self.tokenizer = tokenizer
        self.vocab_size = spec.vocab_size
        core = make_core(
            dataclasses.replace(config, max_waiting_tokens=sys.maxsize),
            LeaderInbox(GrammarGate(self._to_scheduler, self._matchers.start), self._followers.pipes),
            self._to_detokenizer,
            NullSender(),
            has_pace=False,
            has_twin=run.engine.debug_ranks and run.engine.tp == 1,
            gather=self._followers.gather,
        )
        self.scheduler = core.scheduler
        self._loop = make_loop(core, self._engine)
        self._uids = count()
        self._requests: dict[int, _Request] = {}
        self._is_open = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engine; requests that run end unfinished."""
        if self._is_open:
            self._is_open = False
            self._followers.close()  # first: the engine's last step may wait for them
            self._engine.close()
            self._matchers.close()
            self._tokenizer_stage.grammars.close()

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        concurrency: int | None = None,
        priority: int | Sequence[int] = 0,
        deadline_ms: int | None = None,
        cache_salt: str = "",
    ) -> list[Output]:
        """Continue each prompt; text or token ids, one or many.

        Args:
            prompts: one prompt, or a list of prompts.
            params: for all prompts, or one for each; by default the model's own recommendation.
            progress: show a bar; by default for eight prompts and more.
            concurrency: most prompts in the queue or running at a time; by default all, as the scheduler sees fit.
            priority: for all prompts, or one for each; larger is more important, where the policy looks at it.
            deadline_ms: milliseconds from now after which what has not ended does, with FinishReason.DEADLINE.
            cache_salt: K/V is shared only with prompts of the same salt.

        Returns:
            one Output a prompt, in their order.

        Raises:
            InvalidRequest: a prompt or parameter cannot be honoured; nothing of the call goes on.
        """
        single = isinstance(prompts, str) or is_ids(prompts)
        asked = [prompts] if single else list(prompts)
        scheduling = self._scheduling(len(asked), priority, deadline_ms, cache_salt)
        return self._run(asked, params, progress, scheduling, concurrency=concurrency)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int | Sequence[int] = 0,
        deadline_ms: int | None = None,
        cache_salt: str = "",
        **template: Any,
    ) -> list[Output]:
        """Answer one conversation or a list of them; see `generate`. `template` goes to the chat template.

        `template` may hold tools, add_generation_prompt and continue_final_message as in the HTTP API.
        """
        asked = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        scheduling = self._scheduling(len(asked), priority, deadline_ms, cache_salt)
        return self._run(asked, params, progress, scheduling, template=template)

    def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        pooling: Pooling | None = None,
        progress: bool | None = None,
    ) -> list[list[float]]:
        """The embedding of each prompt, of length 1: of its last token's final state, or the mean of all.

        Without `pooling` as the model's files say, else of the last token.

        Raises:
            InvalidRequest: a prompt or the pooling cannot be honoured.
        """
        outputs = self.generate(
            prompts, SamplingParams(max_tokens=0, pooling=pooling or self.tokenizer.pooling), progress=progress
        )
        return [array("f", output.embedding).tolist() for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_ms: int | None = None,
        cache_salt: str = "",
    ) -> Generator[wire.TextDelta, None, None]:
        """Generate one choice piece by piece. Closing the generator aborts the request.

        Args:
            prompt: text, token ids, or chat messages.
            params: by default the model's own recommendation.
            priority, deadline_ms, cache_salt: see `generate`.
        """
        params = params or self.default_params()
        if params.n != 1:
            raise InvalidRequest("stream gives one choice; use generate for n > 1", "n")
        (scheduling,) = self._scheduling(1, priority, deadline_ms, cache_salt)
        (uid,) = self._submit(tokenize_job([next(self._uids)], prompt, params, scheduling, {}))
        deltas = self._requests[uid].deltas
        try:
            while True:
                while deltas:
                    delta = deltas.popleft()
                    if delta.error is not None:
                        raise _error(delta.error)
                    yield delta
                    if delta.finish_reason is not None:
                        return
                self._turn()
        finally:
            self._forget([uid])

    def trace(self, tracer: Tracer | None) -> None:
        """Have `tracer` watch every step from now on; None ends that."""
        self._loop.steps.tracer = self._engine.tracer = tracer

    def default_params(self) -> SamplingParams:
        """What the model's files recommend, else temperature 1."""
        return SamplingParams(**self.tokenizer.sampling_defaults)  # type: ignore[arg-type]

    def _run(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        scheduling: Sequence[Scheduling],
        *,
        concurrency: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        each = self._params_for(prompts, params)
        jobs = [
            tokenize_job([next(self._uids) for _ in range(its.n)], prompt, its, treated, template or {})
            for prompt, its, treated in zip(prompts, each, scheduling, strict=True)
        ]
        uids = [uid for job in jobs for uid in job.uids]
        queue = deque(jobs)
        unfinished: set[int] = set()
        num_ended = num_tokens = 0
        most = concurrency or self.scheduler.config.max_waiting
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        is_hidden = not (len(prompts) >= PROGRESS_FROM if progress is None else progress)
        try:
            with Progress(*columns, TimeRemainingColumn(), disable=is_hidden) as bar:
                task = bar.add_task("", total=len(uids), speed="")
                while queue or unfinished:
                    while queue and (not unfinished or len(unfinished) + len(queue[0].uids) <= most):
                        unfinished.update(self._submit(queue.popleft()))
                    ended = self._turn()
                    for uid in unfinished.intersection(ended):
                        unfinished.remove(uid)
                        last = self._requests[uid].deltas[-1]
                        if last.error is not None:
                            raise _error(last.error)
                        num_ended += 1
                        num_tokens += last.completion_tokens
                        speed = f"{num_tokens / max(bar.tasks[task].elapsed or 0.0, 1e-9):.0f} tok/s"
                        bar.update(task, completed=num_ended, speed=speed)
            return [self._output(job.uids) for job in jobs]
        finally:
            self._forget(uids)

    def _params_for(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(params)} sampling parameters", "params")
        return list(params)

    def _scheduling(
        self, count: int, priority: int | Sequence[int], deadline_ms: int | None, cache_salt: str
    ) -> list[Scheduling]:
        priorities = [priority] * count if isinstance(priority, int) else list(priority)
        if len(priorities) != count:
            raise InvalidRequest(f"{count} prompts, but {len(priorities)} priorities", "priority")
        if any(priorities) and not self.scheduler.config.has_priorities:
            advice = 'make the LLM with policy="priority" or eviction="priority", or leave it out'
            raise UnsupportedField(f"priority means nothing to this LLM's policies: {advice}", "priority")
        deadline = deadline_from(milliseconds(), deadline_ms)
        return [Scheduling(priority=its, deadline=deadline, salt=cache_salt) for its in priorities]

    def _submit(self, job: wire.TokenizeJob) -> list[int]:
        """Put a job's requests into the queue; nothing is queued when it is refused."""
        jobs, answer = self._tokenizer_stage.process(job)
        if isinstance(answer, wire.Refused):
            raise _error(answer.error)
        for generate in jobs:
            self._requests[generate.uid] = _Request(answer.prompt_tokens)
            self._to_scheduler.send(self._followers.as_sent(generate))
        return job.uids

    def _turn(self) -> list[int]:
        """One turn of the loop, and its text brought to the requests; returns those that ended. Closes if it fails."""
        if not self._is_open:
            raise TokenmillError("this LLM is closed")
        ended = []
        with interrupts_held():
            try:
                self._loop.turn()
                self._followers.count_turn()
            except RankLost as error:
                told = self._followers.explain(error)
                self.close()
                raise told from error
            except Exception:
                self.close()  # the requests of a step that was not committed never end
                raise
            for message in self._to_detokenizer.receive():
                assert not isinstance(message, wire.Stop)
                batch, aborts = self._detokenizer_stage.process(message)
                if aborts:
                    self._to_scheduler.send(wire.Abort(aborts))
                for delta in batch.deltas if batch else ():
                    if request := self._requests.get(delta.uid):
                        request.deltas.append(delta)
                        if delta.token_ids and request.first_token_at is None:
                            request.first_token_at = time.perf_counter()
                        if delta.finish_reason is not None:
                            ended.append(delta.uid)
        return ended

    def _output(self, uids: list[int]) -> Output:
        requests = [self._requests[uid] for uid in uids]
        completions = []
        for request in requests:
            last = request.deltas[-1]
            assert last.finish_reason is not None
            ids = wire.unpack_ids(b"".join(delta.token_ids for delta in request.deltas))
            text = "".join(delta.text for delta in request.deltas)
            logprobs = _joined(delta.logprobs for delta in request.deltas)
            completions.append(Completion(text, ids, last.finish_reason, last.stop_reason, logprobs))
        generated = sum(request.deltas[-1].completion_tokens for request in requests)
        cached = max(request.deltas[-1].cached_tokens for request in requests)
        first = min(
            (request.first_token_at for request in requests if request.first_token_at is not None), default=None
        )
        prompt_logprobs = _joined(delta.prompt_logprobs for delta in requests[0].deltas)
        usage = Usage(requests[0].prompt_tokens, generated, cached)
        return Output(completions, usage, first, prompt_logprobs, requests[0].deltas[-1].embedding)

    def _forget(self, uids: list[int]) -> None:
        """Drop what is kept of these requests, ending those that still run."""
        forgotten = [(uid, request) for uid in uids if (request := self._requests.pop(uid, None))]
        running = [uid for uid, request in forgotten if not any(delta.finish_reason for delta in request.deltas)]
        if running and self._is_open:
            self._to_scheduler.send(wire.Abort(running))
            while self.scheduler.has_work and not self._requests:
                self._turn()


def _run_config(model: str | Path | RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Options by field name, each given to the config that has the field."""
    run = model if isinstance(model, RunConfig) else RunConfig(ModelConfig(str(model)))
    options = {"tp" if name == "tensor_parallel_size" else name: value for name, value in options.items()}
    owners = {option.name: part for part, config in vars(run).items() for option in dataclasses.fields(config)}
    unknown = [name for name in options if name not in owners]
    if unknown:
        raise ConfigError(f"LLM has no option {unknown[0]!r}; known: {', '.join(sorted(owners))}")
    for name, value in options.items():
        part = owners[name]
        run = dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **{name: value})})
    return run


def _joined(parts: Iterable[list[TokenLogprobs] | None]) -> list[TokenLogprobs] | None:
    given = [part for part in parts if part is not None]
    return [entry for part in given for entry in part] if given else None


def _error(info: wire.ErrorInfo) -> TokenmillError:
    return InvalidRequest(info.message, info.param) if info.status == 400 else TokenmillError(info.message)
