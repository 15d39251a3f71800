"""What keeps a server from starting: exit code 2, one line that tells what to do, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.server import PATIENCE, ROOT
from tests.support.tiny_models import make_tiny_llama
from tests.text.vocabularies import byte_level, byte_level_fields
from tests.weights.gguf_files import write_gguf

pytestmark = pytest.mark.server


def refusal(tmp_path: Path, *arguments: str | Path, prefix: tuple[str, ...] = ()) -> str:
    """The one line that a command which cannot work writes."""
    sockets = tmp_path / "t"
    sockets.mkdir()
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tokenmill", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(sockets), "HF_HUB_OFFLINE": "1", "TOKENMILL_CACHE": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    line, end = done.stderr[:-1], done.stderr[-1]
    assert line.startswith("tokenmill: ")
    assert (end, "\n" in line, "Traceback" in line) == ("\n", False, False)
    assert [path.name for path in sockets.iterdir() if path.name.startswith("tokenmill-")] == []
    return line


def serve(tmp_path: Path, model: Path | str) -> str:
    return refusal(tmp_path, "serve", model, "--port", "0")


@pytest.mark.parametrize(
    ("name", "words"),
    [("nobody/nothing", "cannot fetch nobody/nothing"), ("no/such/folder.gguf", "no model"), ("", "no model")],
)
def test_a_model_that_is_not_there(tmp_path: Path, name: str, words: str) -> None:
    assert words in serve(tmp_path, name)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policy", "sooner"), "use fcfs, longest-prefix, priority, deadline, shortest, fair, or path.py:function"),
        (("--policy", "nowhere.py:order"), "there is no file nowhere.py"),
        (("--max-waiting-tokens", "0"), "--max-waiting-tokens must be at least 1, not 0"),
    ],
)
def test_flags_of_the_queue_that_cannot_work(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    model = make_tiny_llama(tmp_path / "tiny")
    assert words in refusal(tmp_path, "serve", model, "--port", "0", *flags)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # reading its start fails for everybody


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_pipe, "neither a file nor a folder"),
        (make_unreadable, "Input/output error"),
        (Path.mkdir, "has no config.json"),
        (Path.touch, "not a GGUF file"),
    ],
)
def test_a_model_that_is_no_readable_file(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    line = serve(tmp_path, path)
    assert words in line
    assert str(path) in line


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model with its vocabulary, such as could be served."""
    backend = byte_level()
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, vocabulary=byte_level_fields(backend), vocab_size=backend.get_vocab_size())
    return path.read_bytes()


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (lambda data: 6, "header"),
        (lambda data: 20, "header"),
        (lambda data: data.index(b"tokenizer.ggml.tokens") + 400, "header"),
        (lambda data: data.index(b"blk.1.attn_q.weight") + 21, "header"),
        (lambda data: len(data) - 1, "truncated"),
    ],
    ids=["version", "counts", "metadata", "tensor-infos", "data"],
)
def test_a_gguf_that_is_cut(tmp_path: Path, gguf: bytes, length: Callable[[bytes], int], words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf[: length(gguf)])
    line = serve(tmp_path, path)
    assert words in line
    assert str(path) in line


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def take_out_a_field(path: Path) -> None:
    config = json.loads(path.read_text())
    del config["num_hidden_layers"]
    path.write_text(json.dumps(config))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", cut, "truncated"),
        ("model.safetensors", replace_by_a_folder, "model.safetensors"),
        ("config.json", cut, "config.json"),
        ("config.json", take_out_a_field, "num_hidden_layers"),
        ("tokenizer.json", cut, "tokenizer.json"),
        ("tokenizer.json", Path.unlink, "tokenizer.json"),
    ],
)
def test_a_damaged_folder(tmp_path: Path, tiny: Path, file: str, damage: Callable[[Path], None], words: str) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    damage(folder / file)
    assert words in serve(tmp_path, folder)


def test_a_tokenizer_of_another_model(tmp_path: Path, tiny: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    byte_level().save(str(folder / "tokenizer.json"))
    line = refusal(tmp_path, "serve", folder, "--port", "0", "--log-level", "error")
    assert "tokens, but the model vectors for only 260: they do not belong together" in line


def test_a_model_of_pickle_files(tmp_path: Path, tiny: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle files are not read" in serve(tmp_path, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq' are not supported"),
        ({"vocab_size": 300}, "embed_tokens.weight is [260, 64], not [300, 64]"),
    ],
)
def test_a_configuration_that_does_not_fit(tmp_path: Path, tiny: Path, change: dict[str, object], words: str) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert words in serve(tmp_path, folder)


def test_a_port_in_use(tmp_path: Path, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refusal(tmp_path, "serve", tiny, "--port", port)


def test_a_full_disk(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    inside = (
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=1m none {cache} && exec "$@"',
    )
    if shutil.which("unshare") is None or subprocess.run([*inside, "sh", "true"], check=False).returncode:
        pytest.skip("this system does not let a test mount a file system")
    line = refusal(tmp_path, "pull", "smollm2-135m", prefix=(*inside, "sh"))
    assert "no room" in line
    assert "TOKENMILL_CACHE" in line
