"""Build a model and fill its parameters, from a checkpoint or at random."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.select import make_backends
from tokenmill.errors import ModelUnreadable, StartFailed
from tokenmill.layers.build import Build, Source, Sources
from tokenmill.models.base import CausalLM, WeightSource
from tokenmill.models.decoder import Decoder
from tokenmill.models.families import FAMILIES
from tokenmill.models.packed import PackedDecoder
from tokenmill.ops.api import Ops
from tokenmill.ops.cpu.kernels import CpuKernels
from tokenmill.ops.select import make_ops
from tokenmill.parallel.group import Group
from tokenmill.spec import ModelSpec

BLOCK_ELEMENTS = 2**19  # of a tensor held expanded at a time, by each reader
READERS = 8
TASK_BLOCKS = 32
NAMES_SHOWN = 5
HARMLESS_ENDINGS = ("rotary_emb.inv_freq",)


def load_model(
    checkpoint: WeightSource,
    *,
    dtype: torch.dtype,
    group: Group,
    attention: Sequence[AttentionBackend],
    ops: Ops | None = None,
    device: torch.device | None = None,
) -> CausalLM:
    """The model of a checkpoint with its weights, of which each rank of `group` reads its rows.

    Up to 8 threads read, and copy to the device at once: besides the model itself each holds 2**19 numbers, in all
    at most about 64 MiB of host memory.

    Raises:
        ModelUnreadable: unknown family; tensors missing, unexpected, of the wrong shape, or unreadable.
        ConfigError: the model does not divide by the group's size.
        StartFailed: the model does not fit into memory.
    """
    spec, shapes = checkpoint.spec, checkpoint.shapes
    if spec.num_layers > len(shapes):
        raise ModelUnreadable(f"{checkpoint.name} says {spec.num_layers} layers but holds only {len(shapes)} tensors")
    _, planned = build_model(spec, dtype, group, attention, ops, torch.device("meta"))
    _check(checkpoint.name, shapes, planned, spec)
    try:
        model, sources = build_model(spec, dtype, group, attention, ops, device)
    except (RuntimeError, MemoryError) as error:
        size = sum(source.target.nbytes for source in planned.values())
        raise StartFailed(f"no memory for the model's {size / 2**30:.1f} GiB: free some, or take a smaller") from error
    _fill(sources, checkpoint)
    return model


def load_packed(checkpoint: WeightSource, kernels: CpuKernels, bits: int | None) -> PackedDecoder:
    """The model of a checkpoint for which there is nothing `why_not_packed`.

    Raises:
        ModelUnreadable: tensors are missing, unexpected, of the wrong shape, or unreadable.
        StartFailed: the model does not fit into memory.
    """
    spec = checkpoint.spec
    backends, meta = make_backends("reference", spec), torch.device("meta")
    _check(
        checkpoint.name,
        checkpoint.shapes,
        build_model(spec, torch.float32, Group.solo(), backends, None, meta)[1],
        spec,
    )
    try:
        return PackedDecoder(checkpoint, kernels, bits)
    except (RuntimeError, MemoryError) as error:
        raise StartFailed("no memory for the packed model: free some, or take a smaller") from error


def random_model(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    group: Group,
    attention: Sequence[AttentionBackend],
    ops: Ops | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> CausalLM:
    """A model with random weights, for benchmarks without a checkpoint; the same for any number of ranks.

    Raises:
        ModelUnreadable: unknown family.
        ConfigError: the model does not divide by the group's size.
    """
    model, sources = build_model(spec, dtype, group, attention, ops, device)
    generator = torch.Generator(device or "cpu").manual_seed(seed)
    for name, source in sources.items():
        if name.endswith("norm.weight"):
            source.target.fill_(1)
        else:
            bound = math.sqrt(3 / source.shape[-1])  # standard deviation 1 / sqrt(inputs)
            # The whole tensor is drawn, so that all ranks draw alike, and together make the model that one makes.
            whole = source.target.new_empty(source.shape).uniform_(-bound, bound, generator=generator)
            for its in (source, *source.others):
                rows = whole[its.rows.start : its.rows.stop]
                its.target.copy_(rows if its.columns is None else rows[:, its.columns.start : its.columns.stop])
    return model


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    group: Group,
    attention: Sequence[AttentionBackend],
    ops: Ops | None,
    device: torch.device | None,
) -> tuple[CausalLM, Sources]:
    """A model whose parameters hold nothing yet, and where in a checkpoint they are found.

    Raises:
        ModelUnreadable: unknown family.
        ConfigError: the model does not divide by the group's size.
    """
    if spec.family not in FAMILIES:
        raise ModelUnreadable(f"model family {spec.family!r} is not supported; known: {', '.join(FAMILIES)}")
    build = Build(spec, group, ops or make_ops("reference"), attention, dtype, device or torch.device("cpu"))
    model = Decoder(build, FAMILIES[spec.family])
    return model, model.sources()


def _check(where: str, shapes: Mapping[str, tuple[int, ...]], sources: Sources, spec: ModelSpec) -> None:
    harmless = {FAMILIES[spec.family].output + ".weight"} if spec.tie_embeddings else set()
    missing = [name for name in sources if name not in shapes]
    if missing:
        raise ModelUnreadable(f"{where} lacks tensors that its configuration asks for: {_some(missing)}")
    unexpected = [n for n in shapes if n not in sources and n not in harmless and not n.endswith(HARMLESS_ENDINGS)]
    if unexpected:
        raise ModelUnreadable(f"{where} holds tensors that its configuration does not ask for: {_some(unexpected)}")
    wrong = [
        f"{name} is {list(shapes[name])}, not {list(source.shape)}"
        for name, source in sources.items()
        if shapes[name] != source.shape
    ]
    if wrong:
        raise ModelUnreadable(f"{where} holds tensors whose shapes contradict its configuration: {_some(wrong)}")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMES_SHOWN} more" if len(listed) > NAMES_SHOWN else ""
    return ", ".join(listed[:NAMES_SHOWN]) + more


def _fill(sources: Sources, checkpoint: WeightSource) -> None:
    index = next(iter(sources.values())).target.device.index  # None: the CPU

    def begin() -> None:
        torch.set_num_threads(1)
        if index is not None:  # a thread begins with the first device, where pinning would take memory
            torch.accelerator.set_device_index(index)

    def read(name: str, source: Source, start: int, stop: int) -> None:
        columns, first = source.columns, source.rows.start
        with torch.inference_mode():  # a thread has a mode of its own
            for at in range(start, stop, block := _block_rows(source)):
                end = min(at + block, stop)
                rows = checkpoint.read(name, at, end, is_pinned=index is not None and columns is None)
                part = rows if columns is None else rows[:, columns.start : columns.stop]
                source.target[at - first : end - first].copy_(part + source.offset if source.offset else part)

    tasks = [
        (name, source, start, min(start + step, source.rows.stop))
        for name in checkpoint.shapes  # in the order of the files
        if (known := sources.get(name)) is not None and (step := TASK_BLOCKS * _block_rows(known))
        for source in (known, *known.others)
        for start in range(source.rows.start, source.rows.stop, step)
    ]
    readers = min(READERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(readers, "weights", begin) as pool:
        for _ in pool.map(read, *zip(*tasks, strict=True)):  # what fails first ends the rest
            pass


def _block_rows(source: Source) -> int:
    return max(1, BLOCK_ELEMENTS // math.prod(source.shape[1:]))
