"""The scheduler process: one rank's scheduler and engine."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack, closing

import zmq

from tokenmill.engine.warm_up import WarmUp
from tokenmill.procs import Report
from tokenmill.text.grammar import Matchers, Vocabulary
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.wire.channel import NullSender, PushChannel, Sender, ServerChannel, address
from tokenmill.wire.messages import ToDetokenizer, ToServer
from tokenmill.worker.core import make_core
from tokenmill.worker.inbox import open_inbox
from tokenmill.worker.loop import make_loop
from tokenmill.worker.settings import SchedulerSettings


def run_scheduler(settings: SchedulerSettings, report: Report) -> None:
    """Load, report, work until Stop.

    Raises:
        TokenmillError: the model or the configuration cannot be used.
    """
    started = time.perf_counter()
    warm_up = WarmUp(settings.run, settings.model)
    from tokenmill.engine.load import load_engine  # beside the warm-up, as torch's import takes seconds
    from tokenmill.parallel.group import Group

    def vocabulary() -> Vocabulary:
        tokenizer = Tokenizer.load(settings.model, or_bytes=settings.run.model.random_weights)
        return Vocabulary.of(tokenizer, spec.vocab_size)

    matchers = Matchers(vocabulary)
    engine, config, spec = load_engine(settings.run, settings.model, Group.solo(), warm_up, matchers)
    gc.collect()
    gc.freeze()  # what is loaded stays: collections beside steps need not look at it
    with ExitStack() as stack:
        stack.enter_context(closing(matchers))
        stack.enter_context(closing(engine))
        context = stack.enter_context(zmq.Context())
        place = settings.directory, settings.rank, settings.size
        inbox = stack.enter_context(closing(open_inbox(context, *place, matchers.start)))
        detokenizer: Sender[ToDetokenizer] = NullSender()
        server: Sender[ToServer] = NullSender()
        if settings.rank == 0:
            detokenizer = PushChannel(context, address(settings.directory, "detokenizer"))
            server = ServerChannel(context, settings.directory, settings.api_workers)
            stack.enter_context(closing(detokenizer))
            stack.enter_context(closing(server))
        has_twin = settings.run.engine.debug_ranks
        core = make_core(config, inbox, detokenizer, server, has_pace=True, has_twin=has_twin)
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
        while loop.turn():
            pass
