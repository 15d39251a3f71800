"""What the routes need to know."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.text.dialect import Dialect


@dataclass(frozen=True)
class AppSettings:
    """What the routes need to know.

    `has_priorities`: requests may have one. `sampling_defaults` and `dialect` are the model's own. The scheduler must
    answer within `answer_timeout` seconds. A stream without news for `sse_keep_alive` seconds gets a comment; 0 is
    never. `timings`: every answer has them.
    """

    model: str
    max_model_len: int
    max_body_bytes: int
    has_priorities: bool
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    dialect: Dialect = field(default_factory=Dialect)
    answer_timeout: float = 5.0
    sse_keep_alive: float = 0.0
    timings: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
