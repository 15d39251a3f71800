from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import TokenmillError
from tokenmill.hub import resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's .gguf, fetched once into the cache by whichever test process is first."""
    try:
        return resolve_model("smollm2-135m", progress=False).path
    except TokenmillError as error:
        pytest.fail(error.message, pytrace=False)
