"""What `tokenmill models` and `tokenmill plan` print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.families import make_family
from tests.support.tiny_models import make_tiny_llama
from tests.weights.gguf_files import write_gguf
from tokenmill import cli
from tokenmill.weights import gguf_config, hf_config

GPU = ("--device", "cuda", "--memory", "10", "--bandwidth", "2000")


def test_models_lists_what_the_tables_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line for line in lines if line}
    assert set(hf_config.ARCHITECTURES) < set(listed)
    for name, its in gguf_config.ARCHITECTURES.items():
        assert f" {name.split()[0]} " in listed[its.name]
    assert "experts" in listed["MixtralForCausalLM"]
    assert "Q4_1" in listed["GGUF"] or "Q4_1" in "".join(lines)


def test_models_needs_no_torch() -> None:
    script = "import sys; from tokenmill import cli; cli.main(['models']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_a_plan_for_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    arguments = ["plan", str(folder), "--dtype", "float32", "--num-pages", "64", "--max-model-len", "200"]
    arguments += ["--kv-dtype", "bfloat16"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "llama, 2 layers, float32" in shown
    assert "K/V pool: 64 pages of 16, 1,024 tokens" in shown
    assert "K/V, bytes a token       256   2 layers, all tokens, bfloat16" in shown
    assert "GB/s (measured)" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-1:]] == [["200", "4"]]


def test_a_plan_for_a_gpu_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_family(tmp_path, "gemma3")
    assert cli.main(["plan", str(folder), *GPU, "--tp", "2", "--length", "100"]) == 0
    shown = capsys.readouterr().out
    assert "bfloat16, a GPU with 10 GiB free, one of 2 ranks" in shown
    assert "1 layers, all tokens" in shown
    assert "3 layers, window of 16" in shown
    assert "at 2,000 GB/s\n" in shown
    assert shown.splitlines()[-1].split()[:2] == ["100", "256"]


def test_a_plan_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf")
    assert cli.main(["plan", str(path), *GPU]) == 0
    assert "llama, 2 layers, bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "cuda"), "say --memory (GiB free) and --bandwidth (GB/s) of one"),
        ((*GPU, "--tp", "3"), "4 attention heads cannot be split over 3 ranks"),
        ((*GPU, "--kv-dtype", "float32"), "takes K/V of the weights' type, bfloat16"),
        ((*GPU, "--tp", "0"), "--tp must be at least 1, not 0"),
        ((*GPU, "--length", "0"), "--length must be at least 1, not 0"),
        (("--memory", "0"), "--memory must be at least"),
        (("--bandwidth", "-1"), "--bandwidth must be at least"),
        ((*GPU[:3], "0.001", *GPU[4:]), "GiB free: raise --tp, or take a smaller model"),
    ],
)
def test_plans_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    folder = make_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100_000}))
    assert cli.main(["plan", str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err
