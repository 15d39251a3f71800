"""Compile a tiny model's kernels ahead in the warm-up's process, without a GPU, then launch them here.

Prints how many were compiled, how many of the launches' kernels were missing in the cache, the number of launches, what
was imported on the way, the kernels' names, and how many kernels first prompts of other lengths would need besides.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from tests.sched.support import make_config
from tokenmill.attention.triton import TritonAttention
from tokenmill.config import RunConfig
from tokenmill.engine import warm_up
from tokenmill.engine.compiler import FIRST_PROMPTS, Rehearsal
from tokenmill.ops.triton.ops import TritonOps
from tokenmill.parallel.group import Group
from tokenmill.spec import ExpertsSpec, ModelSpec


class NoGPU(CudaDriver):
    """Stands for the driver: launchers are made, or found, as for a GPU; kernels are loaded and launched nowhere."""

    def __init__(self):
        super().__init__()
        self.make_launcher, self.launcher_cls, self.num_launches = self.launcher_cls, self.count_launches, 0
        self.utils = self
        self.get_device_capability = lambda device: (9, 0)
        self.get_current_device = self.get_current_stream = lambda *device: 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *arguments):
        return 1, 1, 0, 0, 1024

    def count_launches(self, source, metadata):
        self.make_launcher(source, metadata)

        def launch(*arguments):
            self.num_launches += 1

        return launch


def main(family: str) -> None:
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
    warm_up.GPU_DRIVERS = (os.devnull,)
    beside = warm_up.WarmUp(RunConfig(), Path(__file__))
    spec = ModelSpec(family, 260, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_position=64)
    if family == "qwen3_moe":
        spec = replace(spec, experts=ExpertsSpec(num_experts=4, num_chosen=2, size=32, dense_layers=(0,)))
    config = make_config(device="cuda", dtype="bfloat16", threads=2, max_running=3, graph_max_batch=2)
    if family == "olmo2":
        spec = replace(spec, qk_norm=True)
    if family == "gemma2":
        spec = replace(spec, window=16, window_layers=(0,), activation="gelu_tanh", attention_cap=5.0, logits_cap=3.0)
        config = replace(config, window=16, num_window_pages=32)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    attention = tuple(
        TritonAttention(scale=1.0, window=kind.window, cap=spec.attention_cap, **heads, num_sms=132, pdl=True)
        for kind in spec.kv_kinds
    )
    few = {"first_prompts": (2,), "prompts": (2,)}
    rehearsal = Rehearsal(spec, Group.solo(), config, TritonOps(has_pdl=True), attention, (9, 0), **few)
    beside.begin(rehearsal)
    beside.wait(for_all=True)
    gpu = NoGPU()
    driver.set_active(gpu)
    names, missing = [], []

    def listen(*, src, cache_hit, **_):
        names.append(src.name)
        missing.extend([] if cache_hit else [src.name])

    knobs.compilation.listener = listen
    files = set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.*"))
    for _ in rehearsal.launch():
        pass
    missing += [path.name for path in set(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.*")) - files]
    print(len(names))
    print(len(missing))
    print(gpu.num_launches)
    print(*sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
    print(*names)
    print(len(first_kernels(tuple(range(5, 65))) - first_kernels(FIRST_PROMPTS)))


def first_kernels(prompts):
    """What first requests to Qwen3-0.6B launch."""
    spec = ModelSpec("qwen3", 151_936, 1024, 3072, 28, 16, 8, head_dim=128, max_position=40_960, tie_embeddings=True)
    config = make_config(device="cuda", dtype="bfloat16", page_size=16, max_running=256)
    attention = TritonAttention(
        scale=1.0, num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, num_sms=132, pdl=True
    )
    found = set()

    def note(*, key, fn, **_):
        found.add((fn.name, key))
        return True

    knobs.runtime.jit_cache_hook = note
    next(Rehearsal(spec, Group.solo(), config, TritonOps(has_pdl=True), (attention,), (9, 0), prompts).launch())
    return found


if __name__ == "__main__":
    main(sys.argv[1])
