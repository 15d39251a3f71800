"""Operations are captured where the engine captures them, and nothing crosses to the device meanwhile."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.graphs import CapturableAttention, RerunDevice
from tests.support.tiny_models import make_tiny_llama
from tokenmill import cli
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.bench import kernels, operations
from tokenmill.bench.operations import Case

NEVER_CAPTURED = {"copy", "prefill attention", "prefill on a prefix"}
DECODE = {"decode attention", "decode attention, ragged"}


class Device(RerunDevice):
    """Refuses numbers while it captures."""

    def __init__(self):
        super().__init__()
        self.is_capturing = False

    def upload(self, numbers):
        assert not self.is_capturing
        return super().upload(numbers)

    def capture(self, work):
        self.is_capturing = True
        try:
            return super().capture(work)
        finally:
            self.is_capturing = False


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize(
    ("attention", "eager"), [(CapturableAttention, NEVER_CAPTURED), (ReferenceAttention, NEVER_CAPTURED | DECODE)]
)
def test_what_the_engine_captures_is_measured_in_a_graph(attention, eager, has_experts, monkeypatch, capsys, tmp_path):
    device, captured = Device(), []

    class Attention(attention):
        def plan(self, *arguments):
            assert not device.is_capturing
            return super().plan(*arguments)

    def measure(device, case):
        before = device.num_captures
        micros = real_micros(device, case)
        captured.append(device.num_captures - before)
        return micros

    real_micros = kernels._micros
    monkeypatch.setattr(kernels, "TRIALS", 1)
    monkeypatch.setattr(kernels, "GRAPH_CALLS", 3)
    monkeypatch.setattr(operations, "MOST_COPIES", 2)
    monkeypatch.setattr(kernels, "_micros", measure)
    monkeypatch.setattr(kernels, "open_device", lambda config: device)
    monkeypatch.setattr(kernels, "make_backends", lambda *_: (Attention(scale=0.25, token_elements=32),))
    model = make_tiny_llama(tmp_path, max_position=2304)
    if has_experts:
        config = json.loads((model / "config.json").read_text()) | EXPERTS
        (model / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3MoeForCausalLM"]}))
    options = ["--device", "cpu", "--dtype", "float32", "--rows", "2", "--context", "20", "--prompt", "20", "--json"]
    assert cli.main(["bench", "kernels", "--model", str(model), *options]) == 0
    names = [json.loads(line)["operation"] for line in capsys.readouterr().out.splitlines()]
    assert captured == [int(name not in eager) for name in names]
    assert set(names) >= NEVER_CAPTURED | DECODE
    assert names.count("experts") == 2 * has_experts
    assert ("gate and up product" in names) is not has_experts


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_figure_is_the_time_of_one_call(is_captured, monkeypatch):
    device, done = RerunDevice(), []

    class Clock:
        """A call takes a microsecond."""

        def stamp(self):
            return 1000 * len(done)

        def nanoseconds(self, stamps):
            return stamps

    def call():
        done.append(True)
        return torch.zeros(1)

    monkeypatch.setattr(kernels, "Clock", Clock)
    assert kernels._micros(device, Case("five calls", 1, [call] * 5, 1, is_captured=is_captured)) == 1
    assert device.num_captures == is_captured
    device.close()
