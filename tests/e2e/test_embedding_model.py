"""A model that makes embeddings only, served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server import serving
from tests.support.tiny_models import make_embedding_model, make_tiny_llama
from tokenmill import LLM

pytestmark = pytest.mark.server
TEXTS = ["one text", "another"]


def test_it_pools_as_its_files_say_or_as_the_flag_does(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "tiny", architecture="Qwen3ForCausalLM")
    make_embedding_model(folder, "mean_tokens")
    with LLM(folder, dtype="float32") as llm:
        expected = {pooling: llm.embed(TEXTS, pooling=pooling) for pooling in ("mean", "last")}
    for pooling, flags in (("mean", ()), ("last", ("--pooling", "last"))):
        with serving(folder, "--dtype", "float32", *flags) as server:
            data = server.post("/v1/embeddings", input=TEXTS, model=str(folder)).json()["data"]
            for found, vector in zip(data, expected[pooling], strict=True):
                assert found["embedding"] == pytest.approx(vector, abs=1e-5)
            refused = server.post("/v1/completions", prompt="x", model=str(folder))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
            assert "embeddings only" in refused.json()["error"]["message"]
