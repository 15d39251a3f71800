"""The benchmarks as commands, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import make_tiny_llama
from tokenmill import cli
from tokenmill.bench.profile import check_file

KERNELS = {
    "copy",
    "qkv product",
    "output product",
    "gate and up product",
    "down product",
    "logits product",
    "norm",
    "rope + K/V store",
    "sampling",
    "sampling, top_k + top_p",
    "decode attention",
    "decode attention, ragged",
    "prefill attention",
    "prefill on a prefix",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position=2304)


def run(tiny: Path, capsys: pytest.CaptureFixture[str], *arguments: str, device: str = "cpu") -> list[dict[str, Any]]:
    given = ["bench", arguments[0], "--model", str(tiny), "--dtype", "float32", "--device", device, "--json"]
    assert cli.main([*given, *arguments[1:]]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert line["setup"]["model"] == str(tiny)
        assert {"dtype", "device", "attention", "tokenmill", "python", "torch"} <= set(line["setup"])
        assert ("threads" in line["setup"]) is (device == "cpu")
    return lines


def test_offline_figures(tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = ["--profile", str(tmp_path / "trace.json")]
    single, prefix, *summary = run(tiny, capsys, "offline", "--shape", "single", "prefix", "--rounds", "1", *profile)
    assert (single["shape"], single["requests"], single["rounds"]) == ("single", 1, 1)
    assert (prefix["shape"], prefix["requests"]) == ("prefix", 16)
    for figure in ("output_tok_s", "prompt_tok_s", "total_s", "ttft_s", "decode_tok_s"):
        median, least, greatest = single[figure]
        assert 0 < least <= median <= greatest
    assert "decode_tok_s" not in prefix, "its prompts take several steps"
    decoded = sum(its["steps"] for its in summary if its["profile"] == "decode" and its["rows"] == [1, 1])
    assert decoded >= 127, "the steps after the first token of the one round that is measured"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_kernel_figures(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(tiny, capsys, "kernels", "--rows", "1", "3", "--context", "70", "--prompt", "40")
    assert {its["operation"] for its in lines} == KERNELS
    decodes = [its for its in lines if its["operation"] == "decode attention"]
    assert [its["rows"] for its in decodes] == [1, 3]
    one_token = 2 * 2 * 16 * 4  # K and V, two heads of 16, float32
    query_and_output = 2 * 4 * 16 * 4
    assert [its["bytes"] for its in decodes] == [n * (70 * one_token + query_and_output) for n in (1, 3)]
    assert all(its["us"] > 0 and its["gb_s"] > 0 for its in lines if its["operation"] != "copy")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernel_figures_of_a_gpu(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(tiny, capsys, "kernels", "--rows", "3", "--context", "70", "--prompt", "40", device="cuda")
    fused = {"rope + decode attention", "rope + decode attention, ragged"}
    assert {its["operation"] for its in lines} == KERNELS | fused
    assert all(its["us"] > 0 and its["share_of_copy"] > 0 for its in lines)


def test_online_figures(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (given,) = run(tiny, capsys, "online", "--requests", "2", "--rate", "1000")
    assert (given["load"], given["request_rate"]) == ("poisson", 1000)
    peak, poisson = run(tiny, capsys, "online", "--requests", "2", "--share", "0.5")
    assert (peak["load"], poisson["load"]) == ("peak", "poisson")
    assert poisson["request_rate"] == peak["request_rate"] / 2
    for line in (given, peak, poisson):
        assert line["requests"] == 2
        assert 0 < line["itl_p50_ms"] <= line["itl_p99_ms"]
        assert 0 < line["ttft_p50_ms"] <= line["ttft_p99_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offline", "--shape", "none"], "there is no shape 'none'; known: single, "),
        (["offline", "--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["offline", "--profile", "/no/such/folder/trace.json"], "--profile /no/such/folder/trace.json cannot be"),
        (["kernels", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["kernels", "--prompt", "0"], "--prompt must be at least 1, not 0"),
        (["online", "--requests", "0"], "--requests must be over 0, not 0"),
        (["online", "--share", "-1"], "--share must be over 0, not -1.0"),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments, "--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith(f"tokenmill: {message}")


def test_without_a_kind_the_kinds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "offline,kernels,online" in capsys.readouterr().err
    assert cli.main(["bench", "--help"]) == 0
    assert "offline,kernels,online" in capsys.readouterr().out


def test_a_trace_file_is_there_when_there_is_a_trace(tmp_path: Path) -> None:
    check_file(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    (tmp_path / "old.json").write_text("old")
    check_file(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
