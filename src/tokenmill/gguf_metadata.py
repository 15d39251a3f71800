"""The header of a GGUF file as plain Python values, read without its tensors' data.

The layout is that of the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. The `gguf`
package's reader makes a numpy view of every string, which takes seconds for a vocabulary; this takes milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.errors import ModelUnreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` slowest dimension first, `kind` a ggml type's number, `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """All key-value pairs of a GGUF file (arrays are lists, strings are text), and its tensors in the file's order.

    Raises ModelUnreadable: not a GGUF file, of another version or byte order, truncated, or damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()
    except OSError as error:
        raise ModelUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, RecursionError, MemoryError, OverflowError) as error:
        reason = str(error) if isinstance(error, _Damage) else "its header is truncated or damaged"
        raise ModelUnreadable(f"{path} is not a usable GGUF file: {reason}. Fetch or convert it again.") from error


class _Damage(ValueError):
    """What is wrong with the header, in words."""


class _Header:
    """A position in the mapped file; every read checks that it ends inside it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        if self._bytes(4) != MAGIC:
            raise _Damage("it does not start with the letters GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            other = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
            raise _Damage(f"it is of version {version}, not {' or '.join(map(str, VERSIONS))}{other}")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        pairs = {self._text(): self._value(self._scalar("I")) for _ in range(num_pairs)}
        alignment = pairs.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damage(f"its alignment is {alignment!r}")
        infos = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        return pairs, [TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in infos]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._text(), self._scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise _Damage(f"its tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _bytes(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise _Damage(f"it ends after {len(self._data)} bytes, in the middle of its header")
        data = self._data[self._position : end]
        self._position = end
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind not in SCALARS:
            raise _Damage(f"it holds a value of the unknown type {kind}")
        return self._scalar(SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in SCALARS:
            layout = f"<{min(count, len(self._data))}{SCALARS[kind]}"
            return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))
        read: Callable[[], Any] = self._text if kind == STRING else lambda: self._value(kind)
        return [read() for _ in range(count)]
