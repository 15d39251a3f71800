"""Logging to stderr: time, level, process, message. Set up once in each process."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class StderrHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs; a class of its own so that a second call replaces the first's."""


def configure(process: str, level: str = "info") -> None:
    """Log tokenmill's messages from `level` up, and other packages' from warning up, under this process's name."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {process}: %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    logging.getLogger("tokenmill").setLevel(level.upper())
