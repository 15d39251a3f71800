from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.text.grammar_gate import GrammarGate
from tokenmill.types import SamplingParams, StructuredOutputs
from tokenmill.wire.channel import MemoryChannel
from tokenmill.wire.messages import Abort, GenerateJob, Probe, TextOptions, TokenizeJob


class Compiler:
    """Futures by pattern, which the test fulfils; a pattern "(" is refused at once."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}

    def __call__(self, wanted: StructuredOutputs) -> Future[Any]:
        assert wanted.regex is not None
        if wanted.regex == "(":
            raise InvalidRequest("bad")
        return self.futures.setdefault(wanted.regex, Future())


def job(uid: int, regex: str | None = None) -> GenerateJob:
    wanted = StructuredOutputs(regex=regex) if regex else None
    params = SamplingParams(structured_outputs=wanted)
    return GenerateJob(uid=uid, token_ids=b"", params=params, max_tokens=1, end_ids=[], text=TextOptions())


def test_only_jobs_whose_grammar_is_being_compiled_wait() -> None:
    pipe, compiler = MemoryChannel[Any](), Compiler()
    gate = GrammarGate(pipe, compiler)
    first, second, third = job(1, "a"), job(2), job(3, "b")
    for message in (first, second, third, Abort([1, 2]), Probe(1), Abort([2])):
        pipe.send(message)
    assert gate.receive(0) == [second, Probe(1)]
    assert gate.receive(0) == []
    compiler.futures["b"].set_result(None)
    pipe.send(Abort([1]))
    pipe.send(Probe(2))
    assert gate.receive(0) == [third, Probe(2)]
    compiler.futures["a"].set_result(None)
    assert gate.receive(0) == [first, Abort([1, 2]), Abort([2]), Abort([1])]
    pipe.send(job(4, "a"))
    assert gate.receive(0) == [job(4, "a")]


def test_a_job_that_cannot_be_compiled_passes() -> None:
    pipe, compiler = MemoryChannel[Any](), Compiler()
    gate = GrammarGate(pipe, compiler)
    params = SamplingParams(n=2, structured_outputs=StructuredOutputs(regex="a"))
    refused, failing = job(1, "("), TokenizeJob(uids=[2, 3], params=params)
    pipe.send(refused)
    pipe.send(failing)
    pipe.send(Abort([3]))
    assert gate.receive(0) == [refused]
    compiler.futures["a"].set_exception(InvalidRequest("bad"))
    assert gate.receive(None) == [failing, Abort([3])]


def test_a_reader_without_work_waits_for_the_first_job_that_passes() -> None:
    pipe, compiler = MemoryChannel[Any](), Compiler()
    gate = GrammarGate(pipe, compiler)
    looks = []

    class Pipe(MemoryChannel[Any]):
        def receive(self, timeout: float | None = None) -> list[Any]:
            looks.append(timeout)
            if len(looks) == 3:
                compiler.futures["a"].set_result(None)
            return super().receive(timeout)

    gate = GrammarGate(pipe := Pipe(), compiler)
    pipe.send(job(1, "a"))
    assert gate.receive(None) == [job(1, "a")]
    assert looks == [None, 0, 0]
    assert gate.receive(None) == []
