"""Tensors in files, by offset: read a few rows at a time, without mapping the file.

Mapped pages would count as the process's memory next to the model that is being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.errors import ModelUnreadable


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how its rows become numbers. A row is all that has one index of the first dimension.

    With `paired_head_dim` the rows of each head of that size lie in the order 0, dim / 2, 1, dim / 2 + 1, ...
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    row_bytes: int
    decode: Callable[[Tensor], Tensor]  # [rows, row_bytes] uint8 to [rows, columns]
    paired_head_dim: int = 0
    kind: str = ""  # the quantised type as GGUF calls it

    @property
    def end(self) -> int:
        """The file's first byte after the tensor."""
        return self.offset + self.shape[0] * self.row_bytes

    def part(self, start: int, stop: int) -> StoredTensor:
        """Rows start .. stop - 1 as a tensor of their own."""
        return replace(self, offset=self.offset + start * self.row_bytes, shape=(stop - start, *self.shape[1:]))

    def unstacked(self) -> list[StoredTensor]:
        """The matrices of a stack [matrices, rows, columns], each as a tensor of its own."""
        count, size = self.shape[0], self.row_bytes
        one = replace(self, shape=self.shape[1:], row_bytes=size // self.shape[1])
        return [replace(one, offset=self.offset + index * size) for index in range(count)]

    def read(self, start: int, stop: int, *, is_pinned: bool = False) -> Tensor:
        """Rows start .. stop - 1 in their own order, [rows, ...]; plain numbers in pinned memory if that is asked for.

        Raises ModelUnreadable: the file cannot be read, or is truncated.
        """
        rows = self.read_packed(start, stop, is_pinned=is_pinned)
        return self.decode(rows).reshape(stop - start, *self.shape[1:])

    def read_packed(self, start: int, stop: int, *, is_pinned: bool = False) -> Tensor:
        """The bytes of rows start .. stop - 1 in their own order, [rows, row_bytes]. Raises as `read`."""
        dim = self.paired_head_dim
        if not dim:
            return self._read_bytes(start, stop, is_pinned)
        first, last = start // dim * dim, -(-stop // dim) * dim
        heads = self._read_bytes(first, last, False).view(-1, dim // 2, 2, self.row_bytes)
        return heads.transpose(1, 2).reshape(last - first, self.row_bytes)[start - first : stop - first]

    def _read_bytes(self, start: int, stop: int, is_pinned: bool) -> Tensor:
        rows = torch.empty((stop - start, self.row_bytes), dtype=torch.uint8, pin_memory=is_pinned)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start * self.row_bytes)
                count = file.readinto(rows.view(-1).numpy().data)
        except OSError as error:
            raise ModelUnreadable(f"{self.path} cannot be read: {error.strerror or error}") from error
        if count != rows.nbytes:
            raise ModelUnreadable(f"{self.path} is truncated: it ends inside a tensor. Fetch it again.")
        return rows


def check_ends(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that end after their file does. Raises ModelUnreadable: a file is truncated."""
    sizes = {path: path.stat().st_size for path in {tensor.path for tensor in tensors.values()}}
    for name, tensor in tensors.items():
        size = sizes[tensor.path]
        if tensor.end > size:
            places = f"it has {size} bytes, its tensor {name} ends at {tensor.end}"
            raise ModelUnreadable(f"{tensor.path} is truncated: {places}. Fetch it again.")


def float_decoder(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Rows of plain numbers of this type."""
    return lambda rows: rows.view(dtype)
