"""What the text processes are started with. Free of heavy imports: the API process builds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TextSettings:
    """A tokenizer or the detokenizer: the model's files, the run's private directory, and its own pipe's name there.

    `chat_template` stands in place of the model's own, the parsers in place of what it shows
    (`text.dialect`). `or_bytes`: see `Tokenizer.load`. `api_workers` is the number of API servers.
    """

    model: Path
    directory: Path
    name: str
    chat_template: Path | None = None
    or_bytes: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    api_workers: int = 1
