"""Attention backends by name."""

from __future__ import annotations

from tokenmill.attention.base import AttentionBackend
from tokenmill.attention.reference import ReferenceAttention
from tokenmill.errors import ConfigError
from tokenmill.spec import ModelSpec


def make_backend(name: str, spec: ModelSpec) -> AttentionBackend:
    """The attention backend called `name` for models of this shape.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == "reference":
        token_elements = spec.num_kv_heads * spec.head_dim
        return ReferenceAttention(scale=spec.head_dim**-0.5, token_elements=token_elements)
    raise ConfigError(f"there is no attention backend called {name!r}; known: reference")
