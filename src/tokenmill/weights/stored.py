"""Tensors in files, by offset: read a few rows at a time, without mapping the file.

Mapped pages would count as the process's memory next to the model that is being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill.errors import ModelUnreadable

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and how its rows become numbers. A row is all that has one index of the first dimension.

    With `paired_head_dim` the rows of each head of that size lie in the order 0, dim / 2, 1, dim / 2 + 1, ...
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    row_bytes: int
    decode: Callable[[Bytes], Tensor]  # [rows, row_bytes] to [rows, columns]
    paired_head_dim: int = 0

    @property
    def end(self) -> int:
        """The file's first byte after the tensor."""
        return self.offset + self.shape[0] * self.row_bytes

    def read(self, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 in their own order, [rows, ...].

        Raises ModelUnreadable: the file cannot be read, or is truncated.
        """
        dim = self.paired_head_dim
        if not dim:
            rows = self._read_bytes(start, stop)
        else:
            first, last = start // dim * dim, -(-stop // dim) * dim
            heads = self._read_bytes(first, last).reshape(-1, dim // 2, 2, self.row_bytes)
            rows = heads.swapaxes(1, 2).reshape(last - first, self.row_bytes)[start - first : stop - first]
        return self.decode(rows).reshape(stop - start, *self.shape[1:])

    def _read_bytes(self, start: int, stop: int) -> Bytes:
        count = (stop - start) * self.row_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + start * self.row_bytes)
                data = np.fromfile(file, dtype=np.uint8, count=count)
        except OSError as error:
            raise ModelUnreadable(f"{self.path} cannot be read: {error.strerror or error}") from error
        if len(data) != count:
            raise ModelUnreadable(f"{self.path} is truncated: it ends inside a tensor. Fetch it again.")
        return data.reshape(stop - start, self.row_bytes)


def check_ends(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that end after their file does. Raises ModelUnreadable: a file is truncated."""
    sizes = {path: path.stat().st_size for path in {tensor.path for tensor in tensors.values()}}
    for name, tensor in tensors.items():
        size = sizes[tensor.path]
        if tensor.end > size:
            places = f"it has {size} bytes, its tensor {name} ends at {tensor.end}"
            raise ModelUnreadable(f"{tensor.path} is truncated: {places}. Fetch it again.")


def float_decoder(dtype: torch.dtype) -> Callable[[Bytes], Tensor]:
    """Rows of plain numbers of this type."""
    return lambda rows: torch.from_numpy(rows).view(dtype)
