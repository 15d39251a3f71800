"""Kernels compiled ahead: all that the engine launches, in processes of their own."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FORKS = """
import os, signal, sys, time
from pathlib import Path
from tokenmill.engine.compiler import compile_all

folder = Path(sys.argv[1])

def meet():  # three at a time: each waits for two others
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)

def no_more_than_three():
    others = len(list(folder.iterdir()))
    meet()
    assert others == 3

compile_all([("meet", meet)] * 3 + [("later", no_more_than_three)], 3)
try:
    compile_all([("raises", lambda: 1 / 0), ("fine", meet), ("crashes", lambda: os.kill(os.getpid(), 11))], 1)
except RuntimeError as error:
    print(error)
compile_all([("parent", lambda: print(os.getppid(), flush=True))], 1)
print(os.getpid())
"""


def run(*arguments, **environment):
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    done = subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_kernel_has_its_process_and_failures_are_named(tmp_path):
    told, parent, itself = run("-c", FORKS, str(tmp_path))
    assert told == "raises, crashes did not compile"
    assert parent == itself


@pytest.fixture
def libcuda(tmp_path):
    """The driver's library, or one that has its functions' names, to link with; as environment variables."""
    if ctypes.util.find_library("cuda"):
        return {}
    package = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia"
    text = "".join((package / name).read_text() for name in ("driver.c", "driver.py"))
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\(", text)))
    (tmp_path / "cuda.c").write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    return {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmo2", "gemma2"])
def test_a_rehearsal_reaches_all_kernels_of_a_model_and_leaves_none_to_the_first_launch(family, tmp_path, libcuda):
    cache = tmp_path / "cache"
    told, *numbers, imported, names, more_at_first = run(
        "-m", "tests.support.rehearsal", family, TRITON_CACHE_DIR=str(cache), **libcuda
    )
    compiled, missing, launched = map(int, numbers)
    assert re.fullmatch(rf"{compiled} kernels compiled in [\d.]+ s", told)
    assert compiled > 5
    assert missing == 0
    assert launched >= compiled
    assert imported == ""
    assert {"_attend", "_gemv_kernel", "_race_kernel", "filter_kernel", "_stage_kernel"} <= set(names.split())
    assert {"_route_kernel", "_experts_kernel"} <= set(names.split()) or family != "qwen3_moe"
    assert more_at_first == "0"
    assert len(list(cache.glob("*/compiled"))) == 1
