"""Operations by name."""

from __future__ import annotations

from tokenmill.errors import ConfigError
from tokenmill.ops.api import Ops
from tokenmill.ops.reference import ReferenceOps


def make_ops(name: str) -> Ops:
    """The operations called `name`.

    Raises:
        ConfigError: there are none of that name.
    """
    if name == "reference":
        return ReferenceOps()
    raise ConfigError(f"there are no operations called {name!r}; known: reference")
