from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, serving
from tests.support.tiny_models import make_tiny_llama

CONTEXT = 32768  # long enough for a stream that does not end by itself during a test


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with one token a byte."""
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position=CONTEXT)


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    """A server with the tiny model that a module's tests share."""
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--threads", "1", "--tokenizers", "3")
    with serving(tiny, *flags) as running:
        yield running
        assert running.end(signal.SIGINT) == 0
