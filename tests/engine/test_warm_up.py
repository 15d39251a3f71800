"""The process that compiles ahead, from its parent's side: waited for, told of, and never left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec as really_find_spec
from types import SimpleNamespace

import psutil
import pytest

from tokenmill.config import EngineConfig, RunConfig
from tokenmill.engine import warm_up
from tokenmill.engine.warm_up import WarmUp

PYTHON = sys.executable
CHILD = """#!{python}
import os, subprocess, sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-2]))
assert sys.argv[1:4] == ["-P", "-m", "tokenmill.engine.warm_up"] and int(sys.argv[-1]) == os.getppid()
assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and {path!r} in os.environ["PYTHONPATH"].split(os.pathsep)
{does}
"""
IN_TWO_PARTS = "assert pipe.recv() == 'rehearsal'; pipe.send(''); pipe.recv(); pipe.send('2 kernels compiled in 1.0 s')"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Makes a WarmUp on a machine with a GPU, whose process does what is given; all are cancelled at the end."""
    started = []
    monkeypatch.setattr(warm_up, "GPU_DRIVERS", (os.devnull,))
    monkeypatch.setattr(warm_up, "find_spec", lambda name: SimpleNamespace(origin=__file__))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model").touch()

    def make(does=None, run=None):
        if does is not None:
            program = tmp_path / "program"
            program.write_text(CHILD.format(python=PYTHON, path=sys.path[-1], does=does))
            program.chmod(0o755)
            monkeypatch.setattr(warm_up.sys, "executable", str(program))
        started.append(WarmUp(run or RunConfig(), tmp_path / "model"))
        return started[-1]

    yield make
    for its in started:
        its.cancel()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def marks(tmp_path):
    return list(tmp_path.glob("cache/*/compiled"))


def test_a_first_request_need_not_wait_for_all_kernels_and_the_next_start_for_none(start, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    beside = start(IN_TWO_PARTS)
    assert not beside.is_done()
    beside.begin("rehearsal")
    beside.wait(for_all=False)
    assert not beside.is_done()
    assert marks(tmp_path) == []
    beside._pipe.send("go on")
    beside.wait(for_all=True)
    assert beside.is_done()
    assert caplog.messages == ["2 kernels compiled in 1.0 s"]
    assert len(marks(tmp_path)) == 1
    again = start("raise SystemExit('not again')")
    assert again.is_done()
    again.begin("rehearsal")
    again.wait(for_all=True)
    assert len(caplog.messages) == 1
    other = start(IN_TWO_PARTS, RunConfig(engine=EngineConfig(page_size=32)))
    assert not other.is_done()


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("pipe.send('ValueError: told'); sys.exit(1)", "ValueError: told"),
        ("pipe.recv(); os.kill(os.getpid(), 9)", "the compiling process ended with exit code -9"),
        ("pipe.recv(); pipe.send(''); sys.exit(3)", "the compiling process ended with exit code 3"),
    ],
)
def test_a_failure_is_told_once_and_keeps_nobody_waiting(start, tmp_path, caplog, does, reason):
    beside = start(does)
    beside.begin("rehearsal")
    beside.wait(for_all=False)
    beside.wait(for_all=True)
    assert beside.is_done()
    assert warnings_of(caplog) == [f"kernels are compiled at first use, not ahead: {reason}"]
    assert marks(tmp_path) == []


def test_a_process_that_cannot_start_is_told(start, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(warm_up.sys, "executable", str(tmp_path / "missing"))
    beside = start()
    beside.begin("rehearsal")
    beside.wait(for_all=False)
    assert beside.is_done()
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("begins", [True, False])
def test_cancelling_ends_the_process_and_what_it_started(start, caplog, tmp_path, begins):
    beside = start("print(subprocess.Popen(['sleep', '60']).pid, file=open(sys.argv[0] + '.pid', 'w'), flush=True);"
                   "pipe.send(''); pipe.recv(); pipe.recv()")  # fmt: skip
    if begins:
        beside.begin("rehearsal")
        beside.wait(for_all=False)
    else:
        beside._pipe.recv()
    sleeping = psutil.Process(int((tmp_path / "program.pid").read_text()))
    assert os.getpgid(beside._process.pid) == os.getpgid(sleeping.pid) != os.getpgid(0)
    beside.cancel()
    _, alive = psutil.wait_procs([sleeping], timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert beside._process.returncode == -signal.SIGKILL
    beside.wait(for_all=True)
    assert beside.is_done()
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("what", ["device", "driver", "triton"])
def test_without_a_gpu_nothing_is_started(start, monkeypatch, caplog, what):
    run = RunConfig()
    if what == "device":
        run = replace(run, engine=EngineConfig(device="cpu"))
    elif what == "driver":
        monkeypatch.setattr(warm_up, "GPU_DRIVERS", ("/missing",))
    else:
        monkeypatch.setattr(warm_up, "find_spec", lambda name: None)
    beside = start("raise SystemExit('not wanted')", run)
    assert beside._process is None
    beside.cancel()
    assert beside.is_done()
    assert caplog.messages == []


REAL = """
import logging, os, sys, time
from pathlib import Path
from types import SimpleNamespace
from tokenmill.config import RunConfig
from tokenmill.engine import warm_up

logging.basicConfig(format="%(message)s")
warm_up.GPU_DRIVERS, warm_up.find_spec = (os.devnull,), lambda name: SimpleNamespace(origin=__file__)
beside = warm_up.WarmUp(RunConfig(), Path(__file__))
print(beside._process.pid, "torch" in sys.modules, flush=True)
{then}
"""


def run_real(then, tmp_path):
    """A script without a `__main__` guard."""
    (tmp_path / "script.py").write_text(REAL.format(then=then))
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def test_the_process_tells_why_it_cannot_compile(tmp_path):
    with run_real("beside.begin(None); beside.wait(for_all=True)", tmp_path) as script:
        output, errors = script.communicate(timeout=120)
    assert script.returncode == 0
    assert output.endswith(" False\n")
    assert len(output.splitlines()) == 1
    assert errors.startswith("kernels are compiled at first use, not ahead: ")
    expected = "AttributeError" if really_find_spec("triton") else "ModuleNotFoundError: No module named 'triton'"
    assert expected in errors or "libcuda" in errors
    assert "Traceback" not in errors


def test_the_process_ends_with_a_killed_parent(tmp_path):
    with run_real("time.sleep(120)", tmp_path) as script:
        compiling = psutil.Process(int(script.stdout.readline().split()[0]))
        script.kill()
        _, alive = psutil.wait_procs([compiling], timeout=60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert script.stderr.read() == ""


def test_the_scheduler_process_begins_without_torch():
    code = "import sys, tokenmill.worker.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
