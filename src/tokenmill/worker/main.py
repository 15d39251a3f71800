"""The scheduler process: one rank's scheduler and engine."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import zmq

from tokenmill.engine.warm_up import WarmUp
from tokenmill.errors import RankLost
from tokenmill.parallel.place import ranks_here
from tokenmill.procs import Report
from tokenmill.text.grammar import Matchers, Vocabulary
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.wire.channel import NullSender, PushChannel, Receiver, Sender, ServerChannel, address
from tokenmill.wire.messages import ToDetokenizer, ToScheduler, ToServer
from tokenmill.worker.core import make_core
from tokenmill.worker.inbox import open_leader
from tokenmill.worker.loop import make_loop
from tokenmill.worker.settings import SchedulerSettings

SWITCH_SECONDS = 0.0002


def run_scheduler(settings: SchedulerSettings, report: Report) -> None:
    """Load, report, work until Stop.

    Raises:
        TokenmillError: the model or the configuration cannot be used.
    """
    started = time.perf_counter()
    is_first = settings.rank == ranks_here(settings.run.engine).start  # whose kernels the others find
    warm_up = WarmUp(settings.run, settings.model, is_wanted=is_first)
    from tokenmill.engine.load import load_engine  # beside the warm-up, as torch's import takes seconds
    from tokenmill.worker.ranks import join_group, open_ranks

    def vocabulary() -> Vocabulary:
        tokenizer = Tokenizer.load(settings.model, or_bytes=settings.run.model.random_weights)
        return Vocabulary.of(tokenizer, spec.vocab_size)

    matchers = Matchers(vocabulary)
    group = join_group(settings)
    engine, config, spec = load_engine(settings.run, settings.model, group, warm_up, matchers)
    if not settings.has_bounds:
        config = replace(config, max_waiting_tokens=sys.maxsize)
    gc.collect()
    gc.freeze()  # what is loaded stays: collections beside steps need not look at it
    if config.device == "cpu":
        sys.setswitchinterval(SWITCH_SECONDS)  # a step that ends must not wait 5 ms for the thread that plans the next
    with ExitStack() as stack:
        stack.enter_context(closing(matchers))
        stack.enter_context(closing(engine))
        context = stack.enter_context(zmq.Context())
        ranks = open_ranks(stack, context, settings, group, report.fail)
        inbox: Receiver[ToScheduler] | None = ranks.inbox
        detokenizer: Sender[ToDetokenizer] = NullSender()
        server: Sender[ToServer] = NullSender()
        if inbox is None:
            leader = open_leader(context, settings.directory, ranks.followers, matchers.start)
            inbox = stack.enter_context(closing(leader))
            detokenizer = PushChannel(context, address(settings.directory, "detokenizer"))
            server = ServerChannel(context, settings.directory, settings.api_workers)
            stack.enter_context(closing(detokenizer))
            stack.enter_context(closing(server))
        core = make_core(
            config,
            inbox,
            detokenizer,
            server,
            has_pace=settings.has_bounds,
            has_twin=settings.run.engine.debug_ranks and group.size == 1,
            gather=ranks.gather,
            lives=ranks.facts,
        )
        loop = make_loop(core, engine)
        report.ready(
            max_model_len=config.max_model_len,
            vocab_size=spec.vocab_size,
            has_output=spec.has_output,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            has_priorities=config.has_priorities,
            dtype=config.dtype,
            device=config.device,
            attention=config.attention,
            threads=config.threads,
            load_seconds=round(time.perf_counter() - started, 2),
        )
        try:
            while loop.turn():
                ranks.count_turn()
        except RankLost:
            ranks.wait()
            raise
