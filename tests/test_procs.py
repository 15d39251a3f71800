"""Child processes: ready, refused, dead, too slow, orphaned, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tokenmill.errors import ConfigError, StartFailed
from tokenmill.procs import ProcessPlan, Report, Supervisor


def serve_for_ever(settings: str, report: Report) -> None:
    report.ready(said=settings, pid=os.getpid())
    signal.pause()


def ignore_terminate(settings: None, report: Report) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report.ready()
    while True:
        signal.pause()


def refuse(settings: str, report: Report) -> None:
    raise ConfigError(settings)


def crash(settings: None, report: Report) -> None:
    raise ZeroDivisionError("no luck")


def kill_self(settings: None, report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(settings: None, report: Report) -> None:
    pass


def never_ready(settings: None, report: Report) -> None:
    signal.pause()


def refuse_later(settings: None, report: Report) -> None:
    report.ready()
    raise ConfigError("changed my mind")


def plan(target: object, settings: object = None, name: str = "worker") -> ProcessPlan:
    return ProcessPlan(name, target, settings)  # type: ignore[arg-type]


def test_ready_tells_name_pid_and_info_and_stop_leaves_none() -> None:
    supervisor = Supervisor(30)
    ready = supervisor.start([plan(serve_for_ever, "hi", "one"), plan(f"{__name__}:serve_for_ever", "ho", "two")])
    assert {name: message.info["said"] for name, message in ready.items()} == {"one": "hi", "two": "ho"}
    pids = [message.pid for message in ready.values()]
    assert pids == [message.info["pid"] for message in ready.values()]
    os.kill(pids[0], signal.SIGINT)
    assert psutil.Process(pids[0]).name() == "tm-one"
    supervisor.stop(5)
    assert not any(map(psutil.pid_exists, pids))
    supervisor.stop(5)


@pytest.mark.parametrize(
    ("target", "settings", "words"),
    [
        (refuse, "bad flag", "worker could not start: bad flag"),
        (crash, None, "worker could not start: ZeroDivisionError: no luck"),
        (kill_self, None, "worker could not start: killed by SIGKILL \\(out of memory\\?\\)"),
        (leave, None, "worker could not start: it ended with exit code 0"),
        ("tokenmill.no_such:thing", None, "No module named 'tokenmill.no_such'"),
    ],
)
def test_failure_before_ready_names_process_and_reason(target: object, settings: object, words: str) -> None:
    supervisor = Supervisor(30)
    with pytest.raises(StartFailed, match=words):
        supervisor.start([plan(serve_for_ever, "x", "other"), plan(target, settings)])
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in psutil.Process().children())


def test_user_error_has_no_traceback_and_other_errors_have_one(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartFailed):
        Supervisor(30).start([plan(refuse, "bad flag")])
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(StartFailed):
        Supervisor(30).start([plan(crash)])
    assert "ZeroDivisionError: no luck" in capfd.readouterr().err


def test_timeout_names_the_process() -> None:
    with pytest.raises(StartFailed, match=r"slow not ready within 0\.3 s"):
        Supervisor(0.3).start([plan(never_ready, name="slow")])


def test_watch_tells_which_child_ended_and_how() -> None:
    supervisor = Supervisor(30)
    ready = supervisor.start([plan(serve_for_ever, "a", "one"), plan(serve_for_ever, "b", "two")])

    async def kill_and_watch() -> tuple[str, int, str]:
        watching = asyncio.create_task(supervisor.watch())
        await asyncio.sleep(0)
        os.kill(ready["two"].pid, signal.SIGSEGV)
        ended = await watching
        return ended.name, ended.exit_code, ended.reason

    assert asyncio.run(kill_and_watch()) == ("two", -signal.SIGSEGV, "killed by SIGSEGV")
    supervisor.stop(5)


def test_watch_tells_the_reason_of_a_child_that_gave_one() -> None:
    supervisor = Supervisor(30)
    supervisor.start([plan(refuse_later)])
    ended = asyncio.run(supervisor.watch())
    assert (ended.exit_code, ended.reason) == (2, "changed my mind")
    supervisor.stop(5)


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    supervisor = Supervisor(30)
    pid = supervisor.start([plan(ignore_terminate)])["worker"].pid
    supervisor.stop(0.1)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("kernel_helps", [True, False])
def test_children_die_with_a_killed_parent(kernel_helps: bool, tmp_path: os.PathLike[str]) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal, sys
        from tokenmill.procs import ProcessPlan, Supervisor

        def child(settings, report):
            if not {kernel_helps}:
                import ctypes
                ctypes.CDLL(None).prctl(1, 0)
            report.ready()
            signal.pause()

        if __name__ == "__main__":
            ready = Supervisor(30).start([ProcessPlan("orphan", child, None)])
            print(ready["orphan"].pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    path = os.path.join(tmp_path, "parent.py")
    with open(path, "w") as file:
        file.write(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    orphan = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(orphan).wait(10)
