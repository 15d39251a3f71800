"""Between messages and the scheduler: what comes in is added or aborted, what a step brings goes out."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tokenmill.clock import milliseconds
from tokenmill.config import ResolvedConfig
from tokenmill.errors import DeadlinePassed, RanksDisagree, TokenmillError
from tokenmill.sched.pace import Pace
from tokenmill.sched.plan import Ending, Outcome, StepPlan, StepResult
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import FinishReason
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import NullSender, Receiver, Sender
from tokenmill.worker.cache_calls import answer_call

NO_DIGEST = "00" * 16  # of a turn without a step


def compare_plans(digests: Sequence[str]) -> None:
    """Raises RanksDisagree unless the digests of all ranks' plans of a step are equal."""
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise RanksDisagree(
            f"schedulers that were told the same made different plans: number {others[0]} not that of number 0 "
            f"({', '.join(digests)}): a policy of your own must depend on its arguments alone; otherwise this is a bug "
            "of the scheduler"
        )


def make_core(
    config: ResolvedConfig,
    inbox: Receiver[wire.ToScheduler],
    detokenizer: Sender[wire.ToDetokenizer],
    server: Sender[wire.ToServer],
    *,
    has_pace: bool,
    has_twin: bool,
    gather: Callable[[str], Sequence[str]] | None = None,
    lives: Callable[[], list[tuple[int, int]]] = list,
) -> Core:
    """A core with a scheduler of its own, and perhaps a twin (see Core)."""
    nowhere = NullSender()
    twin = make_core(config, inbox, nowhere, nowhere, has_pace=has_pace, has_twin=False) if has_twin else None
    pace = Pace() if has_pace else None
    return Core(Scheduler(config), inbox, detokenizer, server, pace=pace, twin=twin, gather=gather, lives=lives)


class Core:
    """One rank's scheduler with its pipes. Ranks above 0 are given pipes that lead nowhere.

    Without a `pace` no request is refused because its deadline could not be met. A `twin` takes in the same messages
    and results, and must make the same plans. So must all ranks, whose digests `gather` gives for this one's; `lives`
    tells their turns and memory.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Receiver[wire.ToScheduler],
        detokenizer: Sender[wire.ToDetokenizer],
        server: Sender[wire.ToServer],
        *,
        pace: Pace | None = None,
        twin: Core | None = None,
        gather: Callable[[str], Sequence[str]] | None = None,
        lives: Callable[[], list[tuple[int, int]]] = list,
    ) -> None:
        self.scheduler = scheduler
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._server = server
        self._pace = pace
        self._twin, self._gather, self._lives = twin, gather, lives
        self._now = 0
        self._began: list[tuple[int, int]] = []  # not told yet

    def intake(self, prepare: Callable[[], bool]) -> bool:
        """Take in all messages. False: the loop must end.

        When there is nothing to do, `prepare` is called first, and while it says False messages are waited for.
        """
        must_wait = not self.scheduler.has_work and not prepare()
        return self._take_in(self._inbox.receive(None if must_wait else 0))

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute; tells of requests whose deadline has come.

        Raises RanksDisagree: the twin or another rank made another plan.
        """
        plan = self.scheduler.plan(self._now)
        if ended := self.scheduler.take_ended():
            self._detokenizer.send(wire.TokenBatch(finished=_finishes(ended), now=self._now))
        if plan is not None and plan.openings:
            now = milliseconds()
            self._began += [(opening.uid, now) for opening in plan.openings]
        if self._pace is not None:
            self._pace.planned(plan.num_tokens if plan else 0, self._now, is_busy=self.scheduler.num_waiting > 0)
        if self._gather is not None:
            compare_plans(self._gather(plan.digest() if plan else NO_DIGEST))
        if self._twin is not None:
            compare_plans([plan.digest() if plan else "" for plan in (plan, self._twin.plan())])
        return plan

    def deliver(self, plan: StepPlan, result: StepResult) -> None:
        """Commit a step and send what it brought."""
        outcome = self.scheduler.commit(plan, result)
        if self.scheduler.config.debug_checks:
            self.scheduler.check()
        if outcome.tokens or outcome.admitted or outcome.finished or result.prompt_logprobs:
            began, self._began = self._began, []
            self._detokenizer.send(_columns(outcome, result, began))
        if self._twin is not None:
            self._twin.deliver(plan, result)

    def _take_in(self, messages: Sequence[wire.ToScheduler]) -> bool:
        if self._twin is not None:
            self._twin._take_in(messages)
        accepted: list[int] = []
        finished: list[wire.Finish] = []
        for message in messages:
            match message:
                case wire.Tick(now):
                    self._now = now
                case wire.GenerateJob():
                    self._detokenizer.send(wire.OpenText(message.uid, message.text))
                    refusal = self._add(message)
                    if refusal is None:
                        accepted.append(message.uid)
                    else:
                        finished.append(refusal)
                case wire.Abort():
                    ended = [uid for uid in message.uids if self.scheduler.abort(uid)]
                    finished.extend(wire.Finish(uid=uid, reason=FinishReason.ABORT) for uid in ended)
                case wire.Probe():
                    self._server.send(self._pulse(message.serial))
                case wire.CacheCall():
                    self._server.send(answer_call(self.scheduler.cache, message, self._now))
                case wire.Stop():
                    return False
        if accepted or finished:
            self._detokenizer.send(wire.TokenBatch(accepted=accepted, finished=finished, now=self._now))
        return True

    def _add(self, job: wire.GenerateJob) -> wire.Finish | None:
        token_ids = array("i")
        token_ids.frombytes(job.token_ids)
        request = Request(
            uid=job.uid,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            max_len=len(token_ids) + job.max_tokens,
            params=job.params,
            end_ids=frozenset(job.end_ids),
            **msgspec.structs.asdict(job.scheduling),
        )
        try:
            self.scheduler.add(request, self._now, self._pace.rate if self._pace else 0)
        except DeadlinePassed:
            return wire.Finish(uid=job.uid, reason=FinishReason.DEADLINE)
        except TokenmillError as error:
            return wire.Finish(uid=job.uid, reason=FinishReason.ERROR, error=wire.error_info(error))
        return None

    def _pulse(self, serial: int) -> wire.Pulse:
        scheduler = self.scheduler
        return wire.Pulse(
            serial=serial,
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            **scheduler.cache.usage,
            ranks=self._lives(),
            **dataclasses.asdict(scheduler.counters),
        )


def _columns(outcome: Outcome, result: StepResult, began: list[tuple[int, int]]) -> wire.TokenBatch:
    logprobs = result.logprobs
    return wire.TokenBatch(
        uids=[uid for uid, _ in outcome.tokens],
        counts=[1] * len(outcome.tokens),
        token_ids=wire.pack_ids(token for _, token in outcome.tokens),
        admitted=outcome.admitted,
        began=began,
        now=milliseconds(),
        finished=_finishes(outcome.finished),
        logprobs={uid: logprobs[uid] for uid, _ in outcome.tokens if uid in logprobs} if logprobs else {},
        prompt_logprobs=dict(result.prompt_logprobs),
        embeddings=dict(result.embeddings),
    )


def _finishes(endings: Iterable[Ending]) -> list[wire.Finish]:
    return [
        wire.Finish(
            uid=ending.uid,
            reason=ending.reason,
            is_stop_token=ending.token is not None,
            stop_token=None if ending.is_end_id else ending.token,
            error=None if ending.error is None else wire.error_info(ending.error),
        )
        for ending in endings
    ]
