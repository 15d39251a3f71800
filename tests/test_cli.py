"""The command line: finding commands, one line and an exit code for errors, flags to configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tokenmill import __version__, cli
from tokenmill.config import DEFAULT_MODEL, RunConfig, ServerConfig
from tokenmill.errors import ConfigError
from tokenmill.flags import PullFlags, ServeFlags, parse
from tokenmill.server import launch


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmill {__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_the_overview_loads_nothing_heavy() -> None:
    script = (
        "import sys; from tokenmill import cli; cli.main(['--help']);"
        "sys.exit(str([name for name in ('tyro', 'torch', 'numpy', 'fastapi', 'zmq') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sreve"]) == 2
    assert "no command 'sreve'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["serve", "--prt", "5"], ["serve", "--port", "x"], ["pull", "--port", "5"]])
def test_wrong_flags_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_users_error_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: RunConfig, server: ServerConfig) -> int:
        raise ConfigError("--page-size must be at least 1, not 0")

    monkeypatch.setattr(launch, "serve", refuse)
    assert cli.main(["serve", "--page-size", "0"]) == 2
    assert capsys.readouterr().err == "tokenmill: --page-size must be at least 1, not 0\n"


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(run: RunConfig, server: ServerConfig) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "serve", interrupt)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_serve_hands_on_its_flags_and_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[RunConfig, ServerConfig]] = []

    def serve(run: RunConfig, server: ServerConfig) -> int:
        seen.append((run, server))
        return 1

    monkeypatch.setattr(launch, "serve", serve)
    flags = [
        "m.gguf",
        "--port",
        "9",
        "--tokenizers",
        "3",
        "--page-size",
        "64",
        "--num-pages",
        "25",
        "--dtype",
        "float32",
    ]
    assert cli.main(["serve", *flags, "--no-prefix-cache", "--loop", "serial", "--served-model-name", "x"]) == 1
    ((run, server),) = seen
    assert type(run) is RunConfig
    assert type(run.model).__module__ == "tokenmill.config", "children unpickle it without the flags' module"
    assert (run.model.model, run.model.dtype, run.engine.page_size, run.engine.num_pages) == (
        "m.gguf",
        "float32",
        64,
        25,
    )
    assert (run.scheduler.prefix_cache, run.scheduler.loop) == (False, "serial")
    assert (server.port, server.tokenizers, server.served_model_name) == (9, 3, "x")


def test_without_flags_the_defaults_are_those_of_the_config() -> None:
    flags = parse(ServeFlags, "serve", [])
    assert (flags.run, flags.server) == (RunConfig(), ServerConfig())
    assert parse(PullFlags, "pull", []).model == DEFAULT_MODEL


def test_numbers_left_open_are_called_auto(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse(ServeFlags, "serve", ["--max-running", "auto", "--num-pages", "7", "--memory-fraction", "0.5"])
    assert flags.run.scheduler.max_running is None
    assert (flags.run.engine.num_pages, flags.run.engine.memory_fraction) == (7, 0.5)
    for wrong in ("many", "1.5"):
        with pytest.raises(SystemExit):
            parse(ServeFlags, "serve", ["--max-running", wrong])
        assert "--max-running {auto}|INT" in capsys.readouterr().err


def test_pull_tells_where_a_model_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert cli.main(["pull", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert cli.main(["pull", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--port", "-1"),
        ("--tokenizers", "0"),
        ("--start-timeout", "0"),
        ("--shutdown-grace", "-1"),
    ],
)
def test_values_that_cannot_work_are_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: Sequence[str] = ["serve", "/no/such.gguf", f"{flag}={value}"]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"tokenmill: {flag} must be from ")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in ("serve --help", "--help"):
        command = f"{sys.executable} -m tokenmill {arguments} | true"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=buffered)
        assert done.stderr == ""
