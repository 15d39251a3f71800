"""Traces from files of each kind, and from seeds."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench import traces
from tokenmill.bench.options import Synthesis
from tokenmill.bench.traces import open_trace
from tokenmill.errors import ConfigError
from tokenmill.sched.simulate import TraceRequest


def read(tmp_path: Path, text: str, suffix: str = ".jsonl", **synthesis: Any) -> list[TraceRequest]:
    path = tmp_path / f"trace{suffix}"
    path.write_text(text)
    return list(open_trace(str(path), Synthesis(**synthesis), None))


def lines(*objects: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def common(one: TraceRequest, other: TraceRequest) -> int:
    """Tokens that two prompts have in common at their begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.token_ids, other.token_ids, strict=False))
    return len(list(pairs))


def test_mooncake(tmp_path: Path) -> None:
    one = {"timestamp": 27000, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}
    two = {"timestamp": 30500, "input_length": 1100, "output_length": 0, "hash_ids": [46, 47, 2**63 + 5]}
    extra = {"tenant": "a", "priority": 3, "deadline_ms": 1500}
    first, second = read(tmp_path, lines(one, two | extra))
    assert (first.arrival, second.arrival) == (0, 3.5), "arrivals count from the first"
    assert (len(first.token_ids), first.output_len, len(second.token_ids), second.output_len) == (1200, 52, 1100, 1)
    assert common(first, second) == 1024
    assert (first.tenant, first.priority, first.deadline) == ("", 0, None)
    assert (second.tenant, second.priority, second.deadline) == ("a", 3, 1.5)


def test_bailian(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "output_length": 9, "type": "text", "turn": 1}
    first, second, third = read(
        tmp_path,
        lines(
            line | {"input_length": 40, "hash_ids": [7, 8, 9]},
            line | {"input_length": 33, "hash_ids": [7, 8], "timestamp": 61.75},
            line | {"input_length": 33, "hash_ids": [7, 8], "timestamp": 61.75},
        ),
    )
    assert (first.arrival, second.arrival) == (0, 0.25)
    assert (len(first.token_ids), len(second.token_ids)) == (40, 33)
    assert common(first, second) == common(second, third) == 32, "what no block tells of is the request's own"


def conversation(*texts: str) -> dict[str, Any]:
    roles = itertools.cycle(("human", "gpt"))
    return {"id": "x", "conversations": [{"from": next(roles), "value": text} for text in texts]}


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_conversations(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "CHUNK_CHARACTERS", 7)
    talk = conversation("how are you?", "fine, thanks", "good! bye", "bye bye")
    given = [talk, conversation("no answer"), conversation("how are you?", "well")]
    text = json.dumps(given, indent=1) if suffix == ".json" else lines(*given)
    first, last = read(tmp_path, text, suffix, rate=4.0, think=3.0)
    assert 0 == first.arrival < last.arrival
    assert (len(first.token_ids), first.output_len) == (3, 3), "4 bytes a token"
    assert common(first, last) == 3
    assert first.follow_up is not None
    follow_up = first.follow_up()
    assert (follow_up.arrival, len(follow_up.token_ids), follow_up.output_len) == (3.0, 3 + 3 + 3, 2)
    assert follow_up.token_ids[:6].tolist() == [*first.token_ids, *[first.output_id] * 3]
    assert follow_up.follow_up is None


def test_tokens_of_conversations_are_counted_as_told(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(lines(conversation("a b c", "d e")))
    (request,) = open_trace(str(path), Synthesis(), lambda text: len(text.split()))
    assert (len(request.token_ids), request.output_len) == (3, 2)


def test_csv(tmp_path: Path) -> None:
    text = "arrival, prompt, output, group, prefix, tenant, priority, deadline_ms\n"
    text += "0.5, 20, 3, g, 8, a, 2, 700\n0.75, 30, 4, g, 8,,,\n1, 9, 4, h\n1.5, 12, 4, h\n2, 5, 5\n"
    first, second, third, fourth, fifth = read(tmp_path, text, ".csv")
    assert [its.arrival for its in (first, second, third)] == [0, 0.25, 0.5]
    assert common(first, second) == 8
    assert common(third, fourth) == 9, "without a prefix length, all that both have"
    assert common(first, third) == common(first, fifth) == 0
    assert (first.tenant, first.priority, first.deadline) == ("a", 2, 0.7)
    assert (second.tenant, second.priority, second.deadline, second.output_len) == ("", 0, None, 4)


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        (
            '{"timestamp": 1, "input_length": 4, "output_length": 2}\n\n{"timestamp": 2,',
            ".jsonl",
            ":3: this is no JSON: ",
        ),
        ('{"timestamp": 1, "input_length": "four", "output_length": 2}', ".jsonl", ":1: Expected `int`, got `str`"),
        ('{"input_length": 4, "output_length": 2}', ".jsonl", ":1: Object missing required field `timestamp`"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2}', ".jsonl", ":1: the prompt has no tokens"),
        ('[\n{"conversations": [{"from": "human"}]}]', ".json", ":2: Object missing required field `value`"),
        ("7", ".json", ":1: a request must be an object, not 7"),
        ("arrival,prompt,output\n1,5,5\n0,5,5\n", ".csv", ":3: this request comes before the one above it"),
        ("arrival,prompt,output\n1,5\n", ".csv", ":2: Object missing required field `output`"),
        ("when,prompt,output\n1,5,5\n", ".csv", ":2: Expected `float`, got `null` - at `$.arrival`"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, suffix: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, suffix)
    assert str(caught.value).startswith(f"{tmp_path / 'trace'}{suffix}{message}")


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no trace 'none': name a file, or one of poisson, bursts, shared-prefixes, agents"
    ):
        open_trace("none", Synthesis(), None)


def test_no_more_is_read_than_asked_for(tmp_path: Path) -> None:
    assert len(read(tmp_path, "arrival,prompt,output\n1,5,5\n2,5,5\nx,5,5\n", ".csv", requests=2)) == 2


@pytest.mark.parametrize("kind", ["poisson", "bursts", "shared-prefixes", "agents"])
def test_seeded_requests_are_the_same_again(kind: str) -> None:
    synthesis = Synthesis(requests=50, prompt=(10, 60), output=(5, 30), prefix=20, burst=5, turns=3)
    trace = list(open_trace(kind, synthesis, None))
    assert list(open_trace(kind, synthesis, None)) == trace or kind == "agents"
    assert [its.arrival for its in open_trace(kind, synthesis, None)] == [its.arrival for its in trace]
    other = open_trace(kind, dataclasses.replace(synthesis, seed=1), None)
    assert [its.arrival for its in other] != [its.arrival for its in trace]
    assert len(trace) == 50
    assert [its.arrival for its in trace] == sorted(its.arrival for its in trace)
    prefix = 20 if kind in ("shared-prefixes", "agents") else 0
    assert all(10 <= len(its.token_ids) - prefix <= 60 for its in trace)
    assert all(5 <= its.output_len <= 30 for its in trace)
    assert {its.tenant for its in trace} == {"tenant0", "tenant1", "tenant2", "tenant3"}


def test_what_seeded_requests_share() -> None:
    synthesis = Synthesis(requests=30, prefix=20, groups=2, burst=10, turns=2)
    bursts = list(open_trace("bursts", synthesis, None))
    assert len({its.arrival for its in bursts}) == 3
    assert {common(bursts[0], its) for its in bursts[1:]} == {0}
    assert {common(a, b) for a, b in itertools.combinations(open_trace("shared-prefixes", synthesis, None), 2)} == {
        0,
        20,
    }


def test_an_agents_calls_do_not_depend_on_who_else_goes_on() -> None:
    def calls(order: int) -> list[list[tuple[float, int, int, str]]]:
        agents: list[Any] = list(open_trace("agents", Synthesis(requests=2, turns=3), None))
        found: list[list[tuple[float, int, int, str]]] = [[], []]
        for turn in range(3):
            for index in (0, 1)[::order]:
                its = agents[index]
                found[index].append((its.arrival, len(its.token_ids), its.output_len, its.tenant))
                after = its.follow_up and its.follow_up()
                assert (after is None) is (turn == 2)
                if after:
                    assert after.token_ids[: len(its.token_ids)] == its.token_ids
                    assert set(after.token_ids[len(its.token_ids) :][: its.output_len]) == {its.output_id}
                agents[index] = after
        return found

    assert calls(1) == calls(-1)
