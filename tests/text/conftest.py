from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.vocabularies import byte_level, byte_level_fields, piece_fields, write_gguf
from tokenmill.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("byte") / "model.gguf", byte_level_fields(byte_level()))


@pytest.fixture(scope="session")
def piece_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("piece") / "model.gguf", piece_fields())


@pytest.fixture(scope="session")
def byte_tokenizer(byte_gguf: Path) -> Tokenizer:
    return Tokenizer.load(byte_gguf)


@pytest.fixture(scope="session")
def piece_tokenizer(piece_gguf: Path) -> Tokenizer:
    return Tokenizer.load(piece_gguf)


@pytest.fixture(scope="session")
def default_tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)
