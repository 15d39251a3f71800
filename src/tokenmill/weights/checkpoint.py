"""Open a model's files: its shape at once, its tensors as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tokenmill.errors import ModelNotFound, ModelUnreadable
from tokenmill.spec import ModelSpec
from tokenmill.weights.gguf_file import read_gguf
from tokenmill.weights.hf_folder import read_folder, read_spec
from tokenmill.weights.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's shape, and its tensors under Hugging Face names in the order of the files.

    No file stays open and nothing is kept: a read opens the file and holds the rows that were asked for.
    """

    name: str
    spec: ModelSpec
    stored: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors' shapes."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    def read(self, name: str, start: int, stop: int, *, is_pinned: bool = False) -> Tensor:
        """Rows start .. stop - 1 of a tensor, [rows, ...]: of the stored type, or float32 if that is quantised.

        May be called by several threads. With `is_pinned` plain numbers come in memory that a GPU copies from.

        Raises ModelUnreadable: the file cannot be read, or is truncated.
        """
        return self.stored[name].read(start, stop, is_pinned=is_pinned)

    def kind(self, name: str) -> str:
        """The quantised type of a tensor as GGUF calls it; empty: it holds plain numbers."""
        return self.stored[name].kind

    def read_packed(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start .. stop - 1 of a tensor as they are in the file, [rows, bytes] uint8. Raises as `read`."""
        return self.stored[name].read_packed(start, stop)


def read_shape(path: Path) -> ModelSpec:
    """The model's shape, of a folder from config.json alone. Raises as `open_checkpoint`."""
    return read_spec(path) if path.is_dir() else open_checkpoint(path).spec


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a Hugging Face folder (config.json, safetensors) or a .gguf file.

    Raises ModelNotFound: nothing is there; ModelUnreadable: truncated, damaged, incomplete, or of an unknown kind.
    """
    if not path.exists():
        raise ModelNotFound(f"there is no model at {path}")
    try:
        spec, stored = read_folder(path) if path.is_dir() else read_gguf(path)
    except OSError as error:
        raise ModelUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    return Checkpoint(str(path), spec, stored)
