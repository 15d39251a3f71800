"""What the text processes are started with. Free of heavy imports: the API process builds these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TokenizerSettings:
    """Tokenizer worker `index`: the model's files, the run's private directory, a template in place of the model's."""

    model: Path
    directory: Path
    index: int
    chat_template: Path | None = None
    or_bytes: bool = False


@dataclass(frozen=True)
class DetokenizerSettings:
    """The detokenizer: the model's files and the run's private directory. `or_bytes`: see `Tokenizer.load`."""

    model: Path
    directory: Path
    or_bytes: bool = False
