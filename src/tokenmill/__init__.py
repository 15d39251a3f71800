"""tokenmill: an inference server for large language models.

``LLM``, ``SamplingParams`` and ``StructuredOutputs`` are the offline interface; ``LLM`` is loaded on first use, since
it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.types import SamplingParams, StructuredOutputs
from tokenmill.version import __version__

if TYPE_CHECKING:
    from tokenmill.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tokenmill.llm import LLM

        return LLM
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
