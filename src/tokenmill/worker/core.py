"""Between messages and the scheduler: what comes in is added or aborted, what a step brings goes out."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable

from tokenmill.errors import TokenmillError
from tokenmill.sched.plan import Outcome, StepPlan, StepResult
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import FinishReason
from tokenmill.wire import messages as wire
from tokenmill.wire.channel import Receiver, Sender


class Core:
    """One rank's scheduler with its pipes. Ranks above 0 are given pipes that lead nowhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        inbox: Receiver[wire.ToScheduler],
        detokenizer: Sender[wire.ToDetokenizer],
        server: Sender[wire.ToServer],
    ) -> None:
        self.scheduler = scheduler
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._server = server

    def intake(self, prepare: Callable[[], bool]) -> bool:
        """Take in all messages. False: the loop must end.

        When there is nothing to do, `prepare` is called first, and while it says False messages are waited for.
        """
        must_wait = not self.scheduler.has_work and not prepare()
        accepted: list[int] = []
        finished: list[wire.Finish] = []
        for message in self._inbox.receive(None if must_wait else 0):
            match message:
                case wire.GenerateJob():
                    self._detokenizer.send(wire.OpenText(message.uid, message.text))
                    error = self._add(message)
                    if error is None:
                        accepted.append(message.uid)
                    else:
                        finished.append(wire.Finish(uid=message.uid, reason=FinishReason.ERROR, error=error))
                case wire.Abort():
                    ended = [uid for uid in message.uids if self.scheduler.abort(uid)]
                    finished.extend(wire.Finish(uid=uid, reason=FinishReason.ABORT) for uid in ended)
                case wire.Probe():
                    self._server.send(self._pulse(message.serial))
                case wire.Stop():
                    return False
        if accepted or finished:
            self._detokenizer.send(wire.TokenBatch(accepted=accepted, finished=finished))
        return True

    def deliver(self, plan: StepPlan, result: StepResult) -> None:
        """Commit a step and send what it brought."""
        outcome = self.scheduler.commit(plan, result)
        if self.scheduler.config.debug_checks:
            self.scheduler.check()
        if outcome.tokens or outcome.admitted or outcome.finished:
            self._detokenizer.send(_columns(outcome))

    def _add(self, job: wire.GenerateJob) -> wire.ErrorInfo | None:
        token_ids = array("i")
        token_ids.frombytes(job.token_ids)
        request = Request(
            uid=job.uid,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            max_len=len(token_ids) + job.max_tokens,
            params=job.params,
            end_ids=frozenset(job.end_ids),
            salt=job.salt,
        )
        try:
            self.scheduler.add(request)
        except TokenmillError as error:
            return wire.ErrorInfo(error.message, error.kind, error.status, error.param)
        return None

    def _pulse(self, serial: int) -> wire.Pulse:
        scheduler, cache = self.scheduler, self.scheduler.cache
        return wire.Pulse(
            serial=serial,
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            free_pages=cache.num_free,
            cached_pages=cache.num_cached,
            num_pages=cache.num_pages,
            **dataclasses.asdict(scheduler.counters),
        )


def _columns(outcome: Outcome) -> wire.TokenBatch:
    return wire.TokenBatch(
        uids=[uid for uid, _ in outcome.tokens],
        counts=[1] * len(outcome.tokens),
        token_ids=wire.pack_ids(token for _, token in outcome.tokens),
        admitted=outcome.admitted,
        finished=[
            wire.Finish(
                uid=ending.uid,
                reason=ending.reason,
                is_stop_token=ending.token is not None,
                stop_token=None if ending.is_end_id else ending.token,
            )
            for ending in outcome.finished
        ],
    )
