from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

import pytest
import torch

import tokenmill
from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError, InvalidRequest, ModelNotFound, TokenmillError
from tokenmill.sampling import base as sampling_base
from tokenmill.trace import DEVICE, Clock, Tracer
from tokenmill.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with LLM(folder, dtype="float32", debug_checks=True) as made:
        yield made


def is_idle(llm: LLM) -> bool:
    return not llm.scheduler.has_work and not llm._requests


def test_text_ids_and_lists_give_the_same(llm):
    ids = llm.tokenizer.encode("hello")
    one = llm.generate("hello", GREEDY)[0]
    assert one.text == llm.generate(ids, GREEDY)[0].text
    several = llm.generate(["hello", "other"], GREEDY)
    assert several[0].text == one.text
    assert llm.generate([ids, [7, 8]], GREEDY)[0].text == one.text
    assert one.usage.prompt_tokens == 5
    assert one.usage.completion_tokens == 8
    assert len(one.choices[0].token_ids) == 8
    assert one.choices[0].finish_reason is FinishReason.LENGTH
    assert is_idle(llm)


def test_an_output_tells_when_its_first_token_came(llm):
    began = time.perf_counter()
    first, second = llm.generate(["hello", "other"], GREEDY)
    assert all(began < output.first_token_at < time.perf_counter() for output in (first, second))
    assert is_idle(llm)


def test_a_tracer_sees_what_runs_while_it_is_set(llm):
    tracer = Tracer(Clock())
    llm.trace(tracer)
    llm.generate("hello", GREEDY)
    llm.trace(None)
    steps = list(tracer.sizes)
    llm.generate("hello", GREEDY)
    assert list(tracer.sizes) == steps
    spans = tracer.spans()
    for name in ("plan", "launch", "wait", "commit", "stage", "forward", "sample"):
        assert {span.step for span in spans if span.name == name} >= set(steps[:8]), name
    device = [span for span in spans if span.track == DEVICE]
    assert all(before.end <= after.begin for before, after in pairwise(device))


def test_parameters_for_each_prompt(llm):
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first, second = llm.generate(["a", "a"], [short, GREEDY])
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (2, 8)
    with pytest.raises(InvalidRequest, match="2 prompts, but 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_choices_have_their_own_seeds_and_one_prompt(llm):
    params = SamplingParams(n=3, seed=4, temperature=2.0, max_tokens=6, ignore_eos=True)
    output = llm.generate("a b", params)[0]
    assert len({choice.text for choice in output.choices}) > 1
    assert output.usage.prompt_tokens == 3
    assert output.usage.completion_tokens == 18
    assert [c.text for c in llm.generate("a b", params)[0].choices] == [c.text for c in output.choices]


def test_concurrency_bounds_what_runs(llm, monkeypatch):
    most = 0
    turn = llm._loop.turn

    def spy():
        nonlocal most
        most = max(most, llm.scheduler.num_running + llm.scheduler.num_waiting)
        return turn()

    monkeypatch.setattr(llm._loop, "turn", spy)
    assert len(llm.generate(["x"] * 9, GREEDY, concurrency=2, progress=True)) == 9
    assert 0 < most <= 2


def test_prompts_with_several_choices_never_overfill_the_queue(tmp_path):
    params = SamplingParams(n=3, seed=1, max_tokens=2, ignore_eos=True)
    with LLM(make_tiny_llama(tmp_path), dtype="float32", max_waiting=4, max_running=1) as llm:
        assert [len(output.choices) for output in llm.generate(["a", "b", "c"], params)] == [3, 3, 3]


def test_a_deadline_ends_what_has_not_ended_and_keeps_it(tmp_path):
    endless = SamplingParams(temperature=0, ignore_eos=True)
    with LLM(make_tiny_llama(tmp_path, max_position=32768), dtype="float32", max_running=1) as llm:
        first, second = llm.generate(["a", "b"], endless, deadline_ms=300)
        assert [output.choices[0].finish_reason for output in (first, second)] == [FinishReason.DEADLINE] * 2
        assert 0 < first.usage.completion_tokens < 32767
        assert (second.text, second.usage.completion_tokens) == ("", 0)
        assert list(llm.stream("a", endless, deadline_ms=300))[-1].finish_reason is FinishReason.DEADLINE
        assert is_idle(llm)
        with pytest.raises(InvalidRequest, match="deadline_ms"):
            llm.generate("a", endless, deadline_ms=0)


def test_priorities_order_what_waits(llm, tmp_path):
    ended = []
    with LLM(make_tiny_llama(tmp_path), dtype="float32", max_running=1, policy="priority", debug_ranks=True) as own:
        turn = own._turn
        own._turn = lambda: ended.extend(uids := turn()) or uids
        outputs = own.generate(["a", "b", "c"], GREEDY, priority=[1, 2, 3])
        assert ended == [2, 1, 0]
        assert outputs[0].text == llm.generate("a", GREEDY)[0].text
        with pytest.raises(InvalidRequest, match="3 prompts, but 2 priorities"):
            own.chat([[{"role": "user", "content": "x"}]] * 3, GREEDY, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="policy"):
        llm.generate("a", GREEDY, priority=1)
    assert is_idle(llm)


def test_salts_share_nothing(llm):
    prompt = list(range(5, 45))
    cached = [llm.generate(prompt, GREEDY, cache_salt=salt)[0].usage.cached_tokens for salt in ("s", "t", "s")]
    assert cached == [0, 0, 32]


def test_prompts_never_overfill_the_queue_in_tokens(tmp_path):
    with LLM(make_tiny_llama(tmp_path), dtype="float32", max_waiting_tokens=10, max_running=1) as llm:
        assert len(llm.generate([[5] * 9] * 4, GREEDY)) == 4


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    expected = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", GREEDY)[0]
    assert llm.chat(messages, GREEDY)[0].text == expected.text
    assert [its.text for its in llm.chat([messages, messages], GREEDY)] == [expected.text] * 2
    longer = [*messages, {"role": "assistant", "content": "yes"}]
    open_end = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes", GREEDY)[0]
    assert llm.chat(longer, GREEDY, continue_final_message=True)[0].text == open_end.text


def test_stream_gives_the_same_text_and_streams_may_interleave(llm):
    whole = {text: llm.generate(text, GREEDY)[0].text for text in ("one", "two")}
    streams = {text: llm.stream(text, GREEDY) for text in whole}
    texts = dict.fromkeys(whole, "")
    while streams:
        for text, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[text]
            else:
                texts[text] += delta.text
    assert texts == whole
    assert is_idle(llm)


def test_closing_a_stream_aborts_it(llm):
    stream = llm.stream("abc", SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    assert is_idle(llm)
    assert llm.scheduler.cache.num_available == llm.scheduler.config.num_pages


def test_ctrl_c_ends_a_call_between_steps(llm, monkeypatch):
    turns = 0
    plan = llm.scheduler.plan

    def interrupt(now):
        nonlocal turns
        turns += 1
        if turns == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return plan(now)

    monkeypatch.setattr(llm.scheduler, "plan", interrupt)
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", SamplingParams(temperature=0, ignore_eos=True, max_tokens=100))
    assert is_idle(llm)
    assert llm.generate("abc", GREEDY)[0].usage.completion_tokens == 8


def test_a_second_ctrl_c_strikes_inside_a_step(llm, monkeypatch):
    held = []
    plan = llm.scheduler.plan

    def hang(now):
        monkeypatch.setattr(llm.scheduler, "plan", plan)
        os.kill(os.getpid(), signal.SIGINT)
        held.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        held.append(False)

    monkeypatch.setattr(llm.scheduler, "plan", hang)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", GREEDY)
    assert held == [True]
    assert is_idle(llm)


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}], [999999], [-1], [2**40], [[]], {}, [None]])
def test_bad_prompts_are_refused(llm, prompt):
    with pytest.raises(InvalidRequest):
        llm.generate([prompt], GREEDY)
    assert is_idle(llm)


def test_one_bad_prompt_ends_the_whole_call(llm):
    with pytest.raises(InvalidRequest):
        llm.generate(["good", ""], GREEDY)
    assert is_idle(llm)


def test_too_long_is_refused_with_the_numbers(llm):
    with pytest.raises(InvalidRequest, match=r"512.*600"):
        llm.generate([[5] * 600], GREEDY)


def test_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="no option 'page_sice'"):
        LLM(tmp_path, page_sice=3)
    with pytest.raises(ModelNotFound):
        LLM(tmp_path / "nowhere")


def test_a_closed_llm_says_so(tmp_path):
    llm = LLM(make_tiny_llama(tmp_path), dtype="float32")
    llm.close()
    llm.close()
    with pytest.raises(TokenmillError, match="closed"):
        llm.generate("a", GREEDY)


@pytest.mark.parametrize("loop", ["serial", "overlap"])
@pytest.mark.parametrize("where", ["launch", "_run_eagerly"])
def test_a_step_that_fails_closes_it_and_ends_all_requests(tmp_path, monkeypatch, loop, where):
    llm = LLM(make_tiny_llama(tmp_path), dtype="float32", loop=loop)
    stream = llm.stream("hello", GREEDY)
    next(stream)
    compute, steps = getattr(llm._engine, where), []

    def fail(plan, *parts):
        steps.append(plan)
        if len(steps) == 2:
            raise RuntimeError("no memory for a step")
        return compute(plan, *parts)

    monkeypatch.setattr(llm._engine, where, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        llm.generate(["a", "b"], GREEDY)
    for more in (lambda: list(stream), lambda: llm.generate("a", GREEDY)):
        with pytest.raises(TokenmillError, match="closed"):
            more()


def test_the_package_exports_llm():
    assert tokenmill.LLM is LLM
    assert not hasattr(tokenmill, "nothing")


def test_a_bias_is_added_to_logits_of_half_precision(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=3, min_tokens=2, logit_bias={77: 90.0})
    with LLM(make_tiny_llama(tmp_path), dtype="bfloat16", debug_checks=True) as made:
        assert made.generate([9, 8, 7], params)[0].choices[0].token_ids == [77, 77, 77]


def test_a_bias_is_added_once(llm, monkeypatch):
    seen = []
    sample = sampling_base.sample

    def spy(logits, *rest):
        ids = sample(logits, *rest)
        seen.append(logits[0, :20].clone())
        return ids

    monkeypatch.setattr(sampling_base, "sample", spy)
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.generate([9, 8, 7], one)
    llm.generate([9, 8, 7], SamplingParams(temperature=0, max_tokens=1, logit_bias={5: 3.0, 7: -2.0}))
    expected = torch.zeros(20)
    expected[[5, 7]] = torch.tensor([3.0, -2.0])
    torch.testing.assert_close(seen[1] - seen[0], expected, atol=1e-4, rtol=0)
