from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tokenmill.errors import TokenmillError
from tokenmill.hub import resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's .gguf, fetched once into the cache by whichever test process is first."""
    try:
        return resolve_model("smollm2-135m")
    except TokenmillError as error:
        pytest.fail(error.message, pytrace=False)


# Programs started in the background of a shell script ignore SIGINT, and so would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
