from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tokenmill import terminal
from tokenmill.errors import RequestTooLong
from tokenmill.terminal import chat, generate
from tokenmill.types import FinishReason, SamplingParams
from tokenmill.wire.messages import TextDelta


@dataclass
class FakeLLM:
    """Answers in three words; `interrupt_at` presses Ctrl-C before that word."""

    words: tuple[str, ...] = ("one ", "two ", "three")
    finish: FinishReason = FinishReason.STOP
    refuse: str = "\0"
    interrupt_at: int | None = None
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams | None] = field(default_factory=list)
    aborted: int = 0
    num_deltas: int = 0

    def stream(self, prompt: Any, params: SamplingParams | None = None, /) -> Generator[TextDelta, None, None]:
        self.asked.append(prompt)
        self.params.append(params)
        if self.refuse in str(prompt):
            raise RequestTooLong("the prompt is too long")
        try:
            self.num_deltas = 1
            yield TextDelta(uid=1, accepted=True)
            for index, word in enumerate(self.words):
                self.num_deltas += 1
                if index == self.interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                is_last = index == len(self.words) - 1
                yield TextDelta(
                    uid=1, text=word, completion_tokens=index + 1, finish_reason=self.finish if is_last else None
                )
        except KeyboardInterrupt:
            self.aborted += 1
            raise


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextmanager
def typed(keys: str) -> Iterator[None]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        yield


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "one two three"}


class TestChat:
    def test_turns_build_on_each_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM()
        params = SamplingParams(temperature=0)
        with typed("hello\r  \rand then?\r/exit\rnever\r"):
            assert chat(llm, "Be brief.", params, is_terminal=True) == 0
        system = {"role": "system", "content": "Be brief."}
        assert llm.asked == [
            [system, user("hello")],
            [system, user("hello"), ANSWER, user("and then?")],
        ]
        assert llm.params == [params, params]
        captured = capsys.readouterr()
        assert captured.out == "one two three\n" * 2
        assert captured.err.count("3 tokens, first after ") == 2

    def test_times_are_those_of_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = FakeLLM()
        monkeypatch.setattr(terminal, "time", SimpleNamespace(perf_counter=lambda: llm.num_deltas))
        outcome = terminal.Conversation(llm).answer("hello", lambda text: None)
        assert outcome.note == "3 tokens, first after 2.00 s, 1.0 tokens/s"

    def test_without_a_system_text_none_is_sent(self) -> None:
        llm = FakeLLM()
        with typed("hello\r\x04"):
            chat(llm, is_terminal=True)
        assert llm.asked == [[user("hello")]]

    def test_reset_forgets_the_messages_and_keeps_the_system_text(self) -> None:
        llm = FakeLLM()
        with typed("hello\r/reset\ragain\r\x04"):
            chat(llm, "S", is_terminal=True)
        assert llm.asked[1] == [{"role": "system", "content": "S"}, user("again")]

    @pytest.mark.parametrize(("line", "system"), [("/system  Be odd. ", ["Be odd."]), ("/system", [])])
    def test_system_starts_anew(self, line: str, system: list[str]) -> None:
        llm = FakeLLM()
        with typed(f"hello\r{line}\ragain\r\x04"):
            chat(llm, "S", is_terminal=True)
        assert llm.asked[1] == [*({"role": "system", "content": text} for text in system), user("again")]

    def test_help_and_unknown_command_reach_no_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM()
        with typed("/help\r/resett now\r\x04"):
            chat(llm, is_terminal=True)
        assert llm.asked == []
        err = capsys.readouterr().err
        assert terminal.HELP in err
        assert "unknown command /resett; /help lists them" in err

    def test_space_sends_a_slash(self) -> None:
        llm = FakeLLM()
        with typed(" /etc/passwd?\r\x04"):
            chat(llm, is_terminal=True)
        assert llm.asked == [[user("/etc/passwd?")]]

    def test_interrupt_stops_the_answer_and_keeps_what_was_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM(interrupt_at=1)
        with typed("hello\rmore\r\x04"):
            assert chat(llm, is_terminal=True) == 0
        assert llm.aborted == 2
        assert llm.asked[1] == [user("hello"), {"role": "assistant", "content": "one "}, user("more")]
        assert "stopped; 1 tokens" in capsys.readouterr().err

    def test_interrupt_at_the_prompt_stays(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM()
        with typed("half a line\x03hello\r\x04"):
            chat(llm, is_terminal=True)
        assert llm.asked == [[user("hello")]]
        assert "Ctrl-D or /exit leaves" in capsys.readouterr().err

    def test_refused_message_is_told_and_forgotten(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM(refuse="huge")
        with typed("huge\rsmall\r\x04"):
            assert chat(llm, is_terminal=True) == 0
        assert llm.asked[1] == [user("small")]
        assert "the prompt is too long" in capsys.readouterr().err

    def test_length_limit_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        with typed("hello\r\x04"):
            chat(FakeLLM(finish=FinishReason.LENGTH), is_terminal=True)
        assert "length limit reached; 3 tokens" in capsys.readouterr().err

    def test_history_is_kept_for_its_owner_and_bounded(self, cache: Path) -> None:
        with typed("hello\r\x04"):
            chat(FakeLLM(), is_terminal=True)
        path = cache / "chat_history"
        assert "+hello\n" in path.read_text()
        assert path.stat().st_mode & 0o077 == 0
        entry = "\n# 2025-01-01 00:00:00\n+some words\n"
        path.write_text(entry * (terminal.MAX_HISTORY_BYTES // len(entry) + 1))
        with typed("\x04"):
            chat(FakeLLM(), is_terminal=True)
        assert set(FileHistory(path).load_history_strings()) == {"some words"}
        assert path.stat().st_size < terminal.MAX_HISTORY_BYTES // 2 + 100
        assert path.read_text().startswith("\n#")

    def test_history_in_memory_where_no_file_can_be(self, cache: Path) -> None:
        cache.touch()
        llm = FakeLLM()
        with typed("hello\r\x04"):
            assert chat(llm, is_terminal=True) == 0
        assert llm.asked == [[user("hello")]]


class TestPipedChat:
    @pytest.fixture
    def lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n/reset\nhuge\nlast"))

    def test_lines_are_answered_in_turn(self, lines: None, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM()
        assert chat(llm) == 0
        assert [prompt[-1] for prompt in llm.asked] == [user("hello"), user("huge"), user("last")]
        assert llm.asked[1] == [user("huge")]
        assert capsys.readouterr() == ("one two three\n" * 3, "new conversation\n")

    def test_refused_line_sets_the_exit_code(self, lines: None, capsys: pytest.CaptureFixture[str]) -> None:
        assert chat(FakeLLM(refuse="huge")) == 1
        assert capsys.readouterr().out == "one two three\n" * 2

    def test_interrupt_ends_the_program(self, lines: None) -> None:
        llm = FakeLLM(interrupt_at=0)
        assert chat(llm) == terminal.INTERRUPTED
        assert len(llm.asked) == 1


class TestGenerate:
    def test_text_goes_to_stdout_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM(words=("a\x1b[2J", "é\ud800"))
        params = SamplingParams(max_tokens=2)
        assert generate(llm, "Once", params) == 0
        assert (llm.asked, llm.params) == (["Once"], [params])
        assert capsys.readouterr() == ("a\x1b[2Jé?\n", "")

    def test_terminal_gets_no_control_characters(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        generate(FakeLLM(words=("a\x1b[2J\r\x9b", "\tb\n")), "x")
        assert capsys.readouterr().out == "a[2J\tb\n\n"

    def test_interrupt_aborts_the_request(self, capsys: pytest.CaptureFixture[str]) -> None:
        llm = FakeLLM(interrupt_at=1)
        assert generate(llm, "x") == terminal.INTERRUPTED
        assert llm.aborted == 1
        assert capsys.readouterr().out == "one \n"

    def test_refusal_is_the_callers(self) -> None:
        with pytest.raises(RequestTooLong):
            generate(FakeLLM(refuse="x"), "x")

    def test_reader_that_leaves_ends_it_in_peace(self) -> None:
        code = (
            "import sys; from tests.test_terminal import FakeLLM; from tokenmill.terminal import generate\n"
            "sys.exit(generate(FakeLLM(words=('word ',) * 100_000), 'x'))"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1]
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(10)
            process.stdout.close()
            errors = process.stderr.read()
        assert (process.returncode, errors) == (0, b"")
