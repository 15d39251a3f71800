import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.harness import Harness
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_tiny_llama
from tests.weights.gguf_files import write_gguf
from tokenmill.attention.select import make_backends
from tokenmill.errors import ConfigError, ModelUnreadable, TokenmillError
from tokenmill.layers.rope import rope_frequencies
from tokenmill.models import load as models_load
from tokenmill.models.base import CausalLM
from tokenmill.models.load import load_model, random_model
from tokenmill.parallel.group import Group
from tokenmill.spec import ExpertsSpec, ModelSpec, RopeSpec
from tokenmill.weights.checkpoint import open_checkpoint

PROMPT = [10, 200, 30, 4, 99, 258, 17]
HOST_MEMORY = 64 << 20  # beside the model
ROOT = Path(__file__).parents[2]


def load(path: Path, group: Group | None = None, dtype: torch.dtype = torch.float32) -> CausalLM:
    checkpoint = open_checkpoint(path)
    backend = make_backends("reference", checkpoint.spec)
    return load_model(checkpoint, dtype=dtype, group=group or Group.solo(), attention=backend)


def logits_of(model: CausalLM, prompt: list[int]) -> Tensor:
    harness = Harness(model, make_backends("reference", model.spec))
    return harness.logits([(0, 0, prompt)], of_all_tokens=True)


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    change_tensors(folder, **{"model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelUnreadable, match=r"lacks tensors .*: model\.norm\.weight, model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_at_most_five_names_are_listed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    change_tensors(folder, **{f"extra.{i}": torch.ones(1) for i in range(7)})
    with pytest.raises(ModelUnreadable, match=r"does not ask for: (extra\.\d, ){4}extra\.\d and 2 more"):
        load(folder)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tie=True)
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(260, 64)}
    change_tensors(folder, **extras)
    assert load(folder).spec.tie_embeddings


def test_tied_weights_must_be_there(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, tie=True)
    change_tensors(folder, **{"model.embed_tokens.weight": None})
    with pytest.raises(ModelUnreadable, match=r"lacks tensors .*: model\.embed_tokens\.weight"):
        load(folder)


def test_untied_output_is_not_ignored(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    change_tensors(folder, **{"lm_head.weight": None})
    with pytest.raises(ModelUnreadable, match=r"lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("intermediate_size", 100, r"gate_proj\.weight is \[96, 64\], not \[100, 64\]"),
        ("intermediate_size", 500_000, r"gate_proj\.weight is \[96, 64\], not \[500000, 64\]"),
        ("num_hidden_layers", 1, r"does not ask for: model\.layers\.1"),
        ("num_hidden_layers", 3, r"lacks tensors .*model\.layers\.2"),
        ("num_hidden_layers", 4000, "says 4000 layers but holds only"),
        ("num_hidden_layers", 500_000, "must be a whole number from 1 to 4096, not 500000"),
        ("vocab_size", 300, r"embed_tokens\.weight is \[260, 64\], not \[300, 64\]"),
    ],
)
def test_sizes_that_contradict_the_file(tmp_path: Path, key: str, value: int, message: str) -> None:
    folder = make_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelUnreadable, match=message):
        load(folder)


def test_a_file_that_shrinks_between_opening_and_loading(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    checkpoint = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 20_000)
    with pytest.raises(ModelUnreadable, match="truncated"):
        load_model(
            checkpoint,
            dtype=torch.float32,
            group=Group.solo(),
            attention=make_backends("reference", checkpoint.spec),
        )


def test_damaged_headers_never_end_in_another_error(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf")
    sound = path.read_bytes()
    header = sound.index(b"blk.1.ffn_down.weight") + 60
    draw, refused = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(sound)
        damaged[draw.randrange(header)] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            load(path)
        except TokenmillError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tie", [True, False])
def test_ranks_together_compute_what_one_does(tmp_path: Path, size: int, tie: bool) -> None:
    folder = make_tiny_llama(tmp_path, attention_bias=True, mlp_bias=True, tie=tie, vocab_size=263)
    expected = logits_of(load(folder), PROMPT)
    for found in run_ranks(size, lambda group: logits_of(load(folder, group), PROMPT)):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_rank_reads_its_rows_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_llama(tmp_path, vocab_size=262))
    read: dict[str, list[tuple[int, int]]] = {}

    class Spy:
        name, spec, shapes = checkpoint.name, checkpoint.spec, checkpoint.shapes

        def read(self, name: str, start: int, stop: int, *, is_pinned: bool = False) -> Tensor:
            read.setdefault(name, []).append((start, stop))
            return checkpoint.read(name, start, stop)

    backends = make_backends("reference", checkpoint.spec)
    load_model(Spy(), dtype=torch.float32, group=Group(1, 2), attention=backends)
    assert read.keys() == checkpoint.shapes.keys()
    assert read["model.layers.0.self_attn.q_proj.weight"] == [(32, 64)]
    assert read["model.layers.1.self_attn.v_proj.weight"] == [(16, 32)]
    assert read["model.layers.1.mlp.up_proj.weight"] == [(48, 96)]
    assert read["lm_head.weight"] == [(131, 262)]
    assert read["model.layers.0.mlp.down_proj.weight"] == [(0, 64)]  # some columns of each row


def test_a_tensor_is_read_in_blocks_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_llama(tmp_path)
    expected = logits_of(load(folder), PROMPT)
    monkeypatch.setattr(models_load, "BLOCK_ELEMENTS", 100)
    monkeypatch.setattr(models_load, "TASK_BLOCKS", 3)
    monkeypatch.setattr(models_load.os, "cpu_count", lambda: 5)
    assert torch.equal(logits_of(load(folder), PROMPT), expected)


def test_ranks_hold_their_share_of_the_kv_heads(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path)
    assert [model.num_kv_heads for model in run_ranks(2, lambda group: load(folder, group))] == [1, 1]


def test_a_number_of_ranks_that_does_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 attention heads cannot be split over 3 ranks"):
        load(make_tiny_llama(tmp_path), Group(0, 3))


def test_gguf_factors_turn_as_llama3_does(tmp_path: Path) -> None:
    llama3 = RopeSpec(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
    scaled, plain = rope_frequencies(llama3, 16, 128), rope_frequencies(RopeSpec(), 16, 128)
    factors = {"rope_freqs.weight": (plain / scaled).numpy()}
    path, _ = write_gguf(tmp_path / "m.gguf", extra=factors)
    torch.testing.assert_close(rope_frequencies(open_checkpoint(path).spec.rope, 16, 128), scaled)
    assert logits_of(load(path), [1, 2, 39]).shape == (3, 40)


def test_random_models_are_repeatable_and_finite() -> None:
    spec = ModelSpec("llama", 50, 32, 48, 2, 4, 2, 8, 64, attention_bias=True)
    backend = make_backends("reference", spec)
    first, again, other = (
        logits_of(random_model(spec, dtype=torch.float32, group=Group.solo(), attention=backend, seed=seed), [1, 2, 3])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert first.isfinite().all()
    assert not torch.allclose(first, other)


def test_ranks_draw_the_model_that_one_rank_does() -> None:
    spec = ModelSpec("qwen3_moe", 51, 32, 48, 2, 4, 1, 8, 64, experts=ExpertsSpec(4, 2, 24, dense_layers=(0,)))
    backend = make_backends("reference", spec)

    def logits(group: Group) -> Tensor:
        return logits_of(random_model(spec, dtype=torch.float32, group=group, attention=backend), [1, 2, 3])

    expected = logits(Group.solo())
    for found in run_ranks(2, logits):
        torch.testing.assert_close(found, expected)


def test_unknown_families_are_refused() -> None:
    spec = ModelSpec("gpt", 50, 32, 48, 2, 4, 2, 8, 64)
    with pytest.raises(ModelUnreadable, match="'gpt' is not supported; known: llama"):
        random_model(spec, dtype=torch.float32, group=Group.solo(), attention=make_backends("reference", spec))


MEASURE = """
import os, resource, sys, torch
from pathlib import Path
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint
os.cpu_count = lambda: 64  # as many readers as there may be
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.ones(64, 64) @ torch.ones(64, 64)
before = peak()
checkpoint = open_checkpoint(Path(sys.argv[1]))
backend = make_backends("reference", checkpoint.spec)
model = load_model(checkpoint, dtype=getattr(torch, sys.argv[2]), group=Group.solo(), attention=backend)
print((peak() - before) * 1024)
"""


def peak_growth(path: Path, dtype: str) -> int:
    command = [sys.executable, "-c", MEASURE, str(path), dtype]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


def test_peak_memory_while_loading_float32(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 2048, "num_layers": 6, "num_heads": 8}
    folder = make_tiny_llama(tmp_path, **sizes)
    model_bytes = (folder / "model.safetensors").stat().st_size
    assert model_bytes > 200e6
    assert peak_growth(folder, "float32") <= model_bytes + HOST_MEMORY


@pytest.mark.model
def test_peak_memory_while_dequantising(default_model: Path) -> None:
    shapes = open_checkpoint(default_model).shapes.values()
    model_bytes = 2 * sum(torch.Size(shape).numel() for shape in shapes)
    assert peak_growth(default_model, "bfloat16") <= model_bytes + HOST_MEMORY
