"""The C kernels: compiled once for this processor, kept in the user's cache, loaded with ctypes.

Plain C11 in the notation of GCC and Clang. What the processor has (AVX-512 VNNI, AVX2, or neither) is decided by the
compiler, so that a cache shared by several kinds of processors holds a library for each.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import StartFailed
from tokenmill.hub import cache_folder

COMPILERS = ("cc", "gcc", "clang")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",))
OPTIONS = ("-std=gnu11", "-O3", "-w", "-shared", "-fPIC", "-pthread")
COMPILE_SECONDS = 60
SOURCES = tuple(sorted((*Path(__file__).parent.glob("*.c"), *Path(__file__).parent.glob("*.h"))))


class Matrix(ctypes.Structure):
    """A packed matrix, as in linear.h."""

    _fields_ = (
        ("bits", c_int32), ("lines", c_int32), ("inputs", c_int32), ("unused", c_int32),
        ("data", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """A layer's matrices, weights of norms, and pools, as in decoder.c."""

    _fields_ = (
        ("qkv", Matrix * 3), ("output", Matrix), ("gate_up", Matrix * 2), ("down", Matrix),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("query_norm", c_void_p), ("key_norm", c_void_p),
        ("keys", c_void_p), ("values", c_void_p),
    )  # fmt: skip


class Model(ctypes.Structure):
    """A decoder, as in decoder.c."""

    _fields_ = (
        ("hidden", c_int32), ("inner", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("dim", c_int32),
        ("rotary_dim", c_int32), ("num_layers", c_int32), ("unused", c_int32), ("eps", c_float),
        ("rope_factor", c_float), ("embedding", Matrix), ("logits", Matrix), ("final_norm", c_void_p),
        ("frequencies", c_void_p), ("layers", POINTER(Layer)),
    )  # fmt: skip


class AttentionPlan(ctypes.Structure):
    """The rows of a step, as in attention.h."""

    _fields_ = (
        ("heads", c_int32), ("kv_heads", c_int32), ("dim", c_int32), ("page_size", c_int32), ("rows", c_int32),
        ("is_bfloat", c_int32), ("pages_stride", c_int32), ("unused", c_int32), ("scale", c_float),
        ("unused_2", c_float), ("page_table", c_void_p), ("slots", c_void_p), ("starts", c_void_p),
        ("firsts", c_void_p),
    )  # fmt: skip


class Step(ctypes.Structure):
    """A step's tensors, as in decoder.c."""

    _fields_ = (
        ("attention", AttentionPlan), ("tokens", c_int32), ("sampled", c_int32), ("ids", c_void_p),
        ("kv_slots", c_void_p), ("positions", c_void_p), ("drawing", c_void_p), ("states", c_void_p),
        ("logits", c_void_p),
    )  # fmt: skip


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pool_open": (c_void_p, (c_int,)),
    "pool_close": (None, (c_void_p,)),
    "pack": (None, (c_void_p, c_int, c_int, c_int, c_void_p, c_int, c_int, c_size_t)),
    "linear": (c_int, (c_void_p, POINTER(Matrix), c_void_p, c_int, c_void_p)),
    "attention": (None, (c_void_p, POINTER(AttentionPlan), c_void_p, c_void_p, c_void_p, c_void_p)),
    "mask_logits": (None, (c_void_p, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p)),
    "decoder_step": (c_int, (c_void_p, POINTER(Model), POINTER(Step))),
}


class CpuKernels:
    """The library and its pool of `threads`, which end with this object. One call at a time, from any thread.

    Raises StartFailed: the system does not give so many threads.
    """

    def __init__(self, library: Path, threads: int) -> None:
        self.library = ctypes.CDLL(str(library))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        pool = self.library.pool_open(threads)
        if not pool:
            raise StartFailed(f"{threads} compute threads cannot be started: lower --threads")
        self.pool = c_void_p(pool)
        weakref.finalize(self, self.library.pool_close, self.pool).atexit = False

    def linear(self, matrix: Matrix, x: Tensor) -> Tensor:
        """X [rows, inputs] float32 times a packed matrix: [rows, lines] float32."""
        rows = x.contiguous()
        out = x.new_empty(len(x), matrix.lines)
        _check(self.library.linear(self.pool, byref(matrix), rows.data_ptr(), len(rows), out.data_ptr()))
        return out

    def attention(self, plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Query [tokens, heads, head_dim] float32 of a step over one layer's pools; the same shape."""
        query, out = query.contiguous(), query.new_zeros(query.shape)
        places = [its.data_ptr() for its in (query, keys, values, out)]
        self.library.attention(self.pool, byref(plan), *places)
        return out

    def apply_masks(self, logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
        """See `sampling.grammar.apply_masks`; all are contiguous."""
        dead = torch.zeros(len(logits), dtype=torch.bool)
        shape, places = (logits.shape[1], len(rows)), (rows.data_ptr(), masks.data_ptr())
        self.library.mask_logits(logits.data_ptr(), *shape, *places, masks.shape[1], dead.data_ptr())
        return dead

    def step(self, model: Model, step: Step) -> None:
        """Run a decoder's step, which writes the K and V of its tokens, its states and its logits."""
        _check(self.library.decoder_step(self.pool, byref(model), byref(step)))


def compiled(flags: Sequence[str] = ()) -> Path:
    """The compiled library, from the cache if it is there. Processes may race: the last to finish is kept.

    Raises:
        OSError: there is no compiler, it fails, the cache cannot be written, or what lies there cannot be loaded.
        SubprocessError: the compiler takes over a minute.
    """
    library = _compiled(flags)
    try:
        ctypes.CDLL(str(library))
    except OSError:  # damaged: it is made anew, once
        library.unlink(missing_ok=True)
        ctypes.CDLL(str(library := _compiled(flags)))
    return library


def _compiled(flags: Sequence[str]) -> Path:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler in PATH (cc, gcc or clang)")
    state = os.stat(compiler)
    told = f"{compiler} {state.st_size} {state.st_mtime_ns} {flags} {OPTIONS} {_processor()}"
    key = hashlib.sha256(told.encode() + b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:24]
    library = cache_folder() / "kernels" / f"{key}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    main = next(str(path) for path in SOURCES if path.suffix == ".c")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        words = ""
        for its in (tuple(flags),) if flags else FOR_THIS_PROCESSOR:
            command = [compiler, *OPTIONS, *its, "-o", str(made), main, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
            if done.returncode == 0:
                with made.open("rb") as file:
                    os.fsync(file.fileno())  # loading a file that was cut short ends the process
                os.replace(made, library)
                return library
            words = words or done.stderr.strip()[-300:]
    raise OSError(f"{compiler} cannot compile them: {words}")


def _processor() -> str:
    """What instructions there are, in the system's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    telling = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return f"{platform.machine()} {platform.processor()} {sorted(telling)}"


def _check(result: int) -> None:
    if result:
        raise MemoryError("no memory for a step: free some, or lower --prefill-budget")
