import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_tiny_llama
from tests.weights.gguf_files import read_all
from tokenmill.errors import ModelNotFound, ModelUnreadable
from tokenmill.weights.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_as_safetensors_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    make_tiny_llama(tmp_path, dtype=dtype, attention_bias=True)
    expected = load_file(tmp_path / "model.safetensors")
    found = read_all(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "one")
    make_tiny_llama(tmp_path / "two", sharded=True)
    one, two = (read_all(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_some_rows(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path))
    expected = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(checkpoint.read("lm_head.weight", 17, 200), expected[17:200])


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match=r"lacks files .* model-00002-of-00002\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, sharded=True)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "more.safetensors")
    edit_index(tmp_path, lambda names: names.update({"other": "more.safetensors"}))
    with pytest.raises(ModelUnreadable, match=r"model\.norm\.weight is twice"):
        open_checkpoint(tmp_path)


def test_a_tensor_twice_in_one_file(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"layers.0.mlp.up_proj", b"layers.1.mlp.up_proj"))
    with pytest.raises(ModelUnreadable, match=r"names twice: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 7, 8, 300, -1])
def test_truncated_safetensors(tmp_path: Path, length: int) -> None:
    make_tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def header_file(path: Path, header: object) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "does not hold JSON"),
        (b"[" * 100_000, "does not hold JSON"),
        ([1], "does not hold a JSON object"),
        ({"a": {"dtype": "F32"}}, "tensor a is not described"),
        ({"a": 1}, "tensor a is not described"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, "contradictory"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, "contradictory"),
        ({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}, "tensor a"),
        ({"a": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}, "type I8, which is not read"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "not read"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    make_tiny_llama(tmp_path)
    header_file(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelUnreadable, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "{", "does not hold JSON"),
        ("model.safetensors", None, "neither model.safetensors nor"),
        (INDEX, "{}", "has no weight_map"),
    ],
)
def test_incomplete_folders(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    make_tiny_llama(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(ModelUnreadable, match=message):
        open_checkpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at"):
        open_checkpoint(tmp_path / "absent")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 and so on, long enough to be read")
    with pytest.raises(ModelUnreadable, match=r"model\.bin"):
        open_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_without_its_head_makes_embeddings(tmp_path: Path, tie: bool) -> None:
    make_tiny_llama(tmp_path, tie=tie)
    whole = read_all(tmp_path)
    bare = {name.removeprefix("model."): tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    spec = open_checkpoint(tmp_path).spec
    assert (spec.has_output, spec.tie_embeddings) == (tie, True)
    found = read_all(tmp_path)
    assert found.keys() == {f"model.{name}" for name in bare}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


def test_pickle_files_are_refused(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnreadable, match=r"pickle files \(\.bin, \.pt\), are not read: save it .* as safetensors"):
        open_checkpoint(tmp_path)
