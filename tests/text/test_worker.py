from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.channels import EndingChannel
from tests.text.test_chat_template import CHATML, prompt
from tests.text.test_detokenizer_stage import step
from tests.text.vocabularies import byte_level, byte_level_fields, write_gguf
from tokenmill.clock import milliseconds
from tokenmill.errors import ConfigError, ModelUnreadable, StartFailed
from tokenmill.procs import ProcessPlan, Supervisor
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.dialect import Dialect
from tokenmill.text.settings import TextSettings
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.worker import TokenizerStage, load_template, tokenizer_loop
from tokenmill.types import SamplingParams, Scheduling, StructuredOutputs, Thoughts
from tokenmill.wire.channel import MemoryChannel, PullChannel, PushChannel, address
from tokenmill.wire.messages import (
    Abort,
    CacheCall,
    ChatPrompt,
    GenerateJob,
    Limits,
    OpenText,
    Refused,
    Stop,
    TextBatch,
    TextOptions,
    Tokenized,
    TokenizeJob,
    ToServer,
    pack_ids,
    unpack_ids,
)

LIMITS = Limits(max_model_len=32, vocab_size=410)


@pytest.fixture
def stage(byte_tokenizer: Tokenizer) -> Iterator[TokenizerStage]:
    made = TokenizerStage(byte_tokenizer, ChatTemplate(CHATML), LIMITS)
    yield made
    made.grammars.close()


def job(uids: list[int] | None = None, **fields: Any) -> TokenizeJob:
    params = SamplingParams(**fields.pop("params", {}))
    return TokenizeJob(uids=uids or [7], params=params, **fields)


def test_a_text_becomes_a_job(stage: TokenizerStage, byte_tokenizer: Tokenizer) -> None:
    params = {"max_tokens": 5, "stop": "x", "min_tokens": 2, "include_stop_str_in_output": True}
    (made,), answer = stage.process(job(text="the fox", params=params))
    ids = byte_tokenizer.encode("the fox")
    assert answer == Tokenized([7], len(ids))
    assert (made.uid, unpack_ids(made.token_ids), made.max_tokens, made.end_ids) == (7, ids, 5, [2])
    tail = pack_ids(ids[-8:])
    assert made.text == TextOptions(stop=["x"], min_tokens=2, include_stop=True, prompt_tail=tail)


def test_choices_share_the_prompt_and_differ_in_seed(stage: TokenizerStage) -> None:
    jobs, answer = stage.process(job([4, 5, 6], token_ids=pack_ids([9]), params={"n": 3, "seed": 40, "max_tokens": 1}))
    assert answer == Tokenized([4, 5, 6], 1)
    assert [(made.uid, made.params.seed, made.params.n) for made in jobs] == [(4, 40, 1), (5, 41, 1), (6, 42, 1)]


def test_bad_words_become_ids_alone_and_behind_a_space(stage: TokenizerStage, byte_tokenizer: Tokenizer) -> None:
    (made,), _ = stage.process(job(text="a", params={"bad_words": [" the", [9, 8]], "max_tokens": 1}))
    spelled = [byte_tokenizer.encode(word, add_special_tokens=False) for word in ("the", " the")]
    assert spelled[0] != spelled[1]
    assert made.params.bad_words == [*spelled, [9, 8]]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": [410]}, "allowed_token_ids"),
        ({"bad_words": [[5, 410]]}, "bad_words"),
        ({"allowed_token_ids": [5, 6], "bad_words": [[5], [6]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2, 5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
def test_what_leaves_nothing_to_draw_is_refused(stage: TokenizerStage, params: dict[str, Any], param: str) -> None:
    jobs, answer = stage.process(job(text="a", params=params))
    assert not jobs
    assert isinstance(answer, Refused)
    assert answer.error.param == param
    assert answer.error.status == 400


def test_max_tokens_left_out_is_what_the_context_leaves(stage: TokenizerStage) -> None:
    (made,), _ = stage.process(job(token_ids=pack_ids([9] * 30)))
    assert made.max_tokens == 2
    assert made.params.seed is not None


def test_ignore_eos_and_echo(stage: TokenizerStage) -> None:
    (made,), _ = stage.process(job(text="a", echo=True, params={"ignore_eos": True, "max_tokens": 1}))
    assert (made.end_ids, made.text.echo_text, made.text.echo_ids) == ([], "a", None)
    (made,), _ = stage.process(job(token_ids=pack_ids([9]), echo=True, params={"max_tokens": 1}))
    assert (made.text.echo_text, made.text.echo_ids) == (None, pack_ids([9]))


def test_ids_that_the_model_lacks(stage: TokenizerStage) -> None:
    stage.limits = Limits(max_model_len=32, vocab_size=2)
    (made,), _ = stage.process(job(token_ids=pack_ids([1])))
    assert made.end_ids == []
    jobs, answer = stage.process(job(text="the fox"))
    assert jobs == []
    assert isinstance(answer, Refused)
    assert (answer.error.status, answer.error.param) == (400, "prompt")


def test_chat(stage: TokenizerStage, byte_tokenizer: Tokenizer) -> None:
    stage.limits = Limits(max_model_len=500, vocab_size=410)
    (made,), answer = stage.process(job(chat=prompt({"role": "user", "content": "fox"})))
    expected = "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
    assert byte_tokenizer.decode(unpack_ids(made.token_ids)) == expected
    assert isinstance(answer, Tokenized)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": ""}, "prompt", "empty"),
        ({"token_ids": b""}, "prompt", "empty"),
        ({}, "prompt", "needs a prompt"),
        ({"token_ids": pack_ids([5, -1])}, "prompt", "-1"),
        ({"token_ids": pack_ids([410])}, "prompt", "from 0 to 409"),
        ({"token_ids": pack_ids([5] * 32)}, "prompt", "maximum context length is 32 tokens.*32 tokens"),
        (
            {"token_ids": pack_ids([5] * 30), "params": {"max_tokens": 3}},
            "max_tokens",
            "33 tokens .30 in the prompt, 3",
        ),
        ({"text": "x", "params": {"max_tokens": 10**9}}, "max_tokens", "1000000001"),
        ({"token_ids": pack_ids([5] * 30), "params": {"min_tokens": 3}}, "min_tokens", "leaves 2"),
        ({"text": "x" * 10**6}, "prompt", "1000000 characters"),
        ({"text": "x", "params": {"stop_token_ids": [410]}}, "stop_token_ids", "410"),
        ({"text": "x", "params": {"logit_bias": {999: 1.0}}}, "logit_bias", "999"),
        ({"text": "x", "params": {"n": 2}}, "n", "2"),
        ({"chat": prompt({"role": "user", "content": "x y " * 20})}, "messages", "a prompt of"),
        ({"chat": prompt({"role": "user", "content": "x" * 9999})}, "messages", "characters"),
    ],
)
def test_what_is_refused(stage: TokenizerStage, fields: dict[str, Any], param: str, words: str) -> None:
    jobs, answer = stage.process(job(**fields))
    assert jobs == []
    assert isinstance(answer, Refused)
    assert (answer.uids, answer.error.status) == ([7], 400)
    assert (answer.error.param, answer.error.kind) == (param, "BadRequestError")
    assert re.search(words, answer.error.message)


def test_a_bug_refuses_one_request_only(
    stage: TokenizerStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_args, **_options: 1 / 0)
    _, answer = stage.process(job(text="x"))
    assert isinstance(answer, Refused)
    assert answer.error.status == 500
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert isinstance(stage.process(job(text="x"))[1], Tokenized)


def test_deep_nesting_is_refused(stage: TokenizerStage) -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    _, answer = stage.process(job(chat=prompt({"role": "user", "content": "x"}, tools=[{"deep": deep}])))
    assert isinstance(answer, Refused)
    assert answer.error.status == 400


def run_tokenizer_loop(stage: TokenizerStage, messages: list[Any]) -> tuple[list[Any], list[Any]]:
    inbox, scheduler, server = EndingChannel(), MemoryChannel[Any](), MemoryChannel[Any]()
    for message in messages:
        inbox.send(message)
    tokenizer_loop(stage, inbox, scheduler, server)
    return scheduler.receive(), server.receive()


def test_loop_drops_jobs_whose_abort_is_there_and_passes_other_aborts_on(byte_tokenizer: Tokenizer) -> None:
    stage = TokenizerStage(byte_tokenizer, None)
    first, second = job([1], text="a"), job([2, 3], text="b", params={"n": 2})
    messages = [LIMITS, first, second, Abort([1]), Abort([3]), job([1], text="c")]
    to_scheduler, to_server = run_tokenizer_loop(stage, messages)
    kinds = [message.uid if isinstance(message, GenerateJob) else message for message in to_scheduler]
    assert kinds == [2, 3, Abort([1]), Abort([3]), 1]
    assert [(type(answer), answer.uids) for answer in to_server] == [
        (Refused, [1]),
        (Tokenized, [2, 3]),
        (Tokenized, [1]),
    ]


def test_loop_gives_prompts_of_questions_as_ids_and_answers_those_without(byte_tokenizer: Tokenizer) -> None:
    stage = TokenizerStage(byte_tokenizer, None)
    calls = [CacheCall(serial=serial, verb="probe", text=text) for serial, text in ((1, "fox"), (2, ""))]
    to_scheduler, to_server = run_tokenizer_loop(stage, [LIMITS, *calls])
    assert to_scheduler == [CacheCall(serial=1, verb="probe", token_ids=pack_ids(byte_tokenizer.encode("fox")))]
    (answer,) = to_server
    assert (answer.serial, answer.error.status, answer.error.param) == (2, 400, "prompt")


def test_loop_drops_jobs_whose_deadline_has_passed(byte_tokenizer: Tokenizer) -> None:
    late, soon = (Scheduling(deadline=milliseconds() + left) for left in (0, 60_000))
    jobs = [job([1], text="a", scheduling=late), job([2], text="a", scheduling=soon)]
    to_scheduler, to_server = run_tokenizer_loop(TokenizerStage(byte_tokenizer, None), [LIMITS, *jobs])
    assert [(made.uid, made.scheduling) for made in to_scheduler] == [(2, soon)]
    assert [(answer.uids, type(answer)) for answer in to_server] == [([1], Refused), ([2], Tokenized)]
    assert to_server[0].error.status == 504


def test_loop_stops_at_once(stage: TokenizerStage) -> None:
    assert run_tokenizer_loop(stage, [job(text="a"), Stop()]) == ([], [])
    assert len(run_tokenizer_loop(stage, [job(text="a")])[0]) == 1


def test_no_job_before_the_limits(byte_tokenizer: Tokenizer) -> None:
    _, answer = TokenizerStage(byte_tokenizer, None).process(job(text="a"))
    assert isinstance(answer, Refused)
    assert answer.error.status == 500


def test_templates(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    assert load_template(byte_tokenizer) is None
    file = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match=r"own\.jinja"):
        load_template(byte_tokenizer, file)
    file.write_text("{{ eos_token }}!")
    template = load_template(byte_tokenizer, file)
    assert template is not None
    assert template.render(prompt({"role": "user", "content": "x"})) == "</s>!"
    file.write_text("{% x %}")
    with pytest.raises(ModelUnreadable):
        load_template(byte_tokenizer, file)


def test_processes_end_to_end(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    fields = byte_level_fields(byte_level()) | {"tokenizer.chat_template": CHATML, "general.sampling.top_k": 9}
    model = write_gguf(tmp_path / "model.gguf", fields)
    supervisor = Supervisor(start_timeout=60)
    context = zmq.Context()
    scheduler = PullChannel[Any](context, address(tmp_path, "scheduler"), GenerateJob | Abort)
    server = PullChannel[Any](context, address(tmp_path, "server-0"), ToServer)
    tokenizer = PushChannel[Any](context, address(tmp_path, "tokenizer-0"))
    detokenizer = PushChannel[Any](context, address(tmp_path, "detokenizer"))
    try:
        settings = TextSettings(model, tmp_path, "tokenizer-0")
        ready = supervisor.start(
            [
                ProcessPlan("tokenizer-0", "tokenmill.text.worker:run_tokenizer", settings),
                ProcessPlan(
                    "detokenizer", "tokenmill.text.worker:run_detokenizer", TextSettings(model, tmp_path, "detokenizer")
                ),
            ]
        )
        own = {"sampling_defaults": {"top_k": 9}, "pooling": "last", "num_own_tokens": len(fields["tokens"]) - 1}
        assert ready["tokenizer-0"].info == {**own, "dialect": Dialect()}
        tokenizer.send(LIMITS)
        tokenizer.send(job([1], text="fox", params={"max_tokens": 3, "stop": ["o"]}))
        (made,) = scheduler.receive(30)
        assert server.receive(30) == [Tokenized([1], len(byte_tokenizer.encode("fox")))]
        detokenizer.send(OpenText(1, made.text))
        detokenizer.send(step({1: unpack_ids(made.token_ids)}))
        (batch,) = server.receive(30)
        assert isinstance(batch, TextBatch)
        assert (batch.deltas[0].text, batch.deltas[0].stop_reason) == ("f", "o")
        assert scheduler.receive(30) == [Abort([1])]
    finally:
        supervisor.stop(grace=5)
        for channel in (scheduler, server, tokenizer, detokenizer):
            channel.close()
        context.term()


def test_a_bad_model_is_the_reason_of_a_failed_start(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    settings = TextSettings(tmp_path / "model.gguf", tmp_path, "tokenizer-0")
    with pytest.raises(StartFailed, match="not a usable GGUF file"):
        Supervisor(start_timeout=60).start(
            [ProcessPlan("tokenizer-0", "tokenmill.text.worker:run_tokenizer", settings)]
        )


def test_no_torch_in_these_processes() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'gguf'}"
    code = f"import sys, tokenmill.text.worker; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def thought_job(
    *, content: str = "x", budget: int | None = None, wanted: StructuredOutputs | None = None
) -> TokenizeJob:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    chat = ChatPrompt(
        messages=messages,
        add_generation_prompt=False,
        continue_final_message=True,
        thought_tags=["<t>", "</t>"],
        thinking_token_budget=budget,
    )
    return TokenizeJob(uids=[1], params=SamplingParams(structured_outputs=wanted), chat=chat)


def test_thoughts_come_before_what_the_output_must_be(stage: TokenizerStage, byte_tokenizer: Tokenizer) -> None:
    stage.limits = Limits(max_model_len=500, vocab_size=410)
    start, end = (byte_tokenizer.encode(tag, add_special_tokens=False) for tag in ("<t>", "</t>"))
    choice = StructuredOutputs(choice=["a"])
    for content, wanted, budget, is_thinking, expected in (
        ("x", choice, None, False, StructuredOutputs(choice=["a"], thoughts=Thoughts(start, end))),
        ("<t>x", choice, 5, True, StructuredOutputs(choice=["a"], thoughts=Thoughts([], end, 5))),
        ("<t>x", None, 5, True, StructuredOutputs(thoughts=Thoughts([], end, 5))),
        ("<t></t>", choice, 5, False, choice),
        ("x", None, None, False, None),
    ):
        (job,), answer = stage.process(thought_job(content=content, budget=budget, wanted=wanted))
        assert isinstance(answer, Tokenized)
        assert answer.is_thinking is is_thinking
        assert job.params.structured_outputs == expected
