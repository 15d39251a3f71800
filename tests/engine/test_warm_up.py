"""Kernels compiled ahead: each once, on other threads, and none launched on the way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest

from tokenmill.engine.warm_up import Compilation

SUPPORT = "tests.support.rehearsal"


@pytest.fixture
def knobs(monkeypatch):
    """Stands for triton.knobs.runtime; `driver` for triton.runtime.driver."""
    triton, runtime, compiler = (ModuleType(name) for name in ("triton", "triton.runtime", "triton.compiler"))
    compiler.ASTSource, compiler.compile = make_source, compile_source
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    runtime.driver = triton.knobs.runtime.driver = Driver()
    for module in (triton, runtime, compiler):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return triton.knobs.runtime


class Driver:
    def __init__(self):
        self.active = self

    def set_active(self, active):
        self.active = active

    def get_current_device(self):
        return 0


class Kernel:
    """A kernel as Triton treats it: by key, compiled at first launch unless the hook says no."""

    def __init__(self, knobs, name="kernel"):
        self.knobs, self.name, self.module = knobs, name, "module"
        self.jit_function = self
        self.device_caches = defaultdict(lambda: ({}, None, "target"))
        self.launched, self.compiled_by = [], []

    @property
    def loaded(self):
        return self.device_caches[self.knobs.driver.active.get_current_device()][0]

    def launch(self, key):
        options = {"specialization_data": '{"options": {"shape": [1, 2]}}'}
        told = {"signature": key, "constants": {}, "configs": ["attributes"], **options}
        hook = self.knobs.jit_cache_hook
        if key in self.loaded or not (hook and hook(key=key, repr="", fn=self, compile=told, is_manual_warmup=False)):
            self.launched.append(key)


def make_source(kernel, signature, constants, attributes):
    assert attributes == "attributes"
    return kernel, signature


def compile_source(source, target, options):
    kernel, key = source
    assert (target, options) == ("target", {"shape": (1, 2)})
    if key == "broken":
        raise ValueError("does not compile")
    if key == "slow":
        assert kernel.may_compile.wait(30)
    kernel.compiled_by.append((key, threading.get_ident()))
    return SimpleNamespace(run="launcher")


def test_what_a_rehearsal_launches_is_compiled_once_and_not_launched(knobs):
    first, second = Kernel(knobs, "first"), Kernel(knobs, "second")
    second.loaded["known"] = "kernel"
    rehearsed_by = []

    def rehearsal(first_known):
        rehearsed_by.append(threading.get_ident())
        for key in ("a", "b", "a", "b"):
            first.launch(key)
        while "a" not in first.device_caches[0][0]:
            pass
        first.launch("a")
        second.launch("a")
        second.launch("known")

    assert Compilation(rehearsal, 3).wait() == 3
    assert sorted(first.loaded) == ["a", "b"]
    assert list(second.loaded) == ["known", "a"]
    assert first.launched == second.launched == []
    assert sorted(key for key, _ in first.compiled_by) == ["a", "b"]
    assert rehearsed_by != [threading.get_ident()]


def test_launches_of_other_threads_and_after_the_rehearsal_are_left_alone(knobs):
    kernel = Kernel(knobs)
    before = knobs.jit_cache_hook = lambda **_: False
    begun, may_end = threading.Event(), threading.Event()

    def rehearsal(first_known):
        begun.set()
        assert may_end.wait(30)

    compilation = Compilation(rehearsal, 1)
    assert begun.wait(30)
    assert knobs.jit_cache_hook is not before
    assert knobs.driver.active is not knobs.driver
    kernel.launch("meanwhile")
    may_end.set()
    assert compilation.wait() == 0
    assert knobs.jit_cache_hook is before
    assert knobs.driver.active is knobs.driver
    kernel.launch("afterwards")
    assert kernel.launched == ["meanwhile", "afterwards"]


def test_only_the_first_kernels_are_waited_for_and_a_launch_waits_for_its_own(knobs):
    kernel = Kernel(knobs)
    kernel.may_compile = threading.Event()

    def rehearsal(first_known):
        kernel.launch("first")
        first_known()
        kernel.launch("slow")

    compilation = Compilation(rehearsal, 2)
    compilation.wait_first()
    assert list(kernel.loaded) == ["first"]
    compilation._rehearsal.result()
    launch = threading.Thread(target=kernel.launch, args=("slow",))
    launch.start()
    launch.join(0.05)
    assert launch.is_alive()
    kernel.may_compile.set()
    launch.join()
    assert kernel.launched == ["slow"]
    assert len(kernel.compiled_by) == 2
    assert compilation.wait() == 2


def test_a_rehearsal_that_fails_keeps_nobody_waiting(knobs):
    compilation = Compilation(lambda first_known: 1 // 0, 1)
    compilation.wait_first()
    with pytest.raises(ZeroDivisionError):
        compilation.wait()
    assert knobs.jit_cache_hook is None


@pytest.mark.parametrize("key", ["broken", None])
def test_errors_are_told_and_the_hook_is_taken_away(knobs, key):
    def rehearsal(first_known):
        Kernel(knobs).launch("fine")
        Kernel(knobs).launch(key) if key else 1 // 0

    with pytest.raises(ValueError if key else ZeroDivisionError):
        Compilation(rehearsal, 2).wait()
    assert knobs.jit_cache_hook is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rehearsal_reaches_all_kernels_of_a_model_and_leaves_none_to_the_first_launch(family, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", SUPPORT, family], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    compiled, missed, launched, names = done.stdout.splitlines()
    assert int(compiled) > 5
    assert int(missed) == 0
    assert int(launched) >= int(compiled)
    assert {"_attend", "_gemv_kernel", "_race_kernel", "_count_kernel", "_stage_kernel"} <= set(names.split())
