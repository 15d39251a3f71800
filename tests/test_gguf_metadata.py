from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.text.vocabularies import write_gguf
from tokenmill.errors import ModelUnreadable
from tokenmill.gguf_metadata import read_header

FIELDS = {
    "a.flag": True,
    "a.count": 7,
    "a.share": 0.5,
    "a.name": "naïve 世界",
    "a.numbers": [1, -2, 3],
    "a.names": ["x", "", "émile"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "some.gguf", FIELDS)


def test_values_come_back_as_written(file: Path) -> None:
    assert read_header(file)[0] == {"general.architecture": "llama", **FIELDS}


def test_every_truncation_is_an_error(file: Path) -> None:
    whole = file.read_bytes()
    for length in range(len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelUnreadable):
            read_header(file)


def test_damage_anywhere_is_an_error_or_harmless(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    refused = 0
    for position in range(4, len(whole) - 8, 4):
        damaged = whole.copy()
        damaged[position : position + 8] = b"\xff" * 8
        file.write_bytes(damaged)
        try:
            read_header(file)
        except ModelUnreadable:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(60), "start with the letters GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "ends after 24 bytes"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnreadable, match=words):
        read_header(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="No such file"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelUnreadable):
        read_header(tmp_path / "empty.gguf")
