"""Compile a tiny model's kernels ahead, without a GPU, then launch them.

Prints how many were compiled, how many the launches missed, the number of launches, and the kernels' names.
"""

from __future__ import annotations

import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.sched.support import make_config
from tokenmill.attention.triton import TritonAttention
from tokenmill.engine import warm_up
from tokenmill.ops.triton.ops import TritonOps
from tokenmill.parallel.group import Group
from tokenmill.spec import ModelSpec


class Target:
    """Stands for the driver: kernels are compiled for one GPU and launched on none."""

    def __init__(self):
        self.utils, self.num_launches = self, 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, *arguments):
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        def launch(*arguments):
            self.num_launches += 1

        return launch


def main(family: str) -> None:
    target = Target()
    driver.set_active(target)
    warm_up.TOKENS = [2]
    spec = ModelSpec(family, 260, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, max_position=64)
    config = make_config(device="cuda", dtype="bfloat16", max_running=3, graph_max_batch=2)
    attention = TritonAttention(
        scale=1.0, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, num_sms=132, pdl=True
    )
    ops = TritonOps(has_pdl=True)

    def rehearse(first_known):
        warm_up.rehearse(spec, Group.solo(), config, ops, attention, first_known)

    compilation = warm_up.Compilation(rehearse, num_threads=2)
    print(compilation.wait())
    assert target.num_launches == 0
    missed = []
    knobs.runtime.jit_cache_hook = lambda *, key, **_: missed.append(key)
    rehearse(lambda: None)
    print(len(missed))
    print(target.num_launches)
    print(*sorted({name.rpartition(".")[2] for name, _ in compilation._kernels}))


if __name__ == "__main__":
    main(sys.argv[1])
