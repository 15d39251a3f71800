"""Logging to stderr: time, level, process, message. Set up once in each process."""

from __future__ import annotations

import logging
import sys


def configure(process: str, level: str = "info") -> None:
    """Log tokenmill's messages from `level` up, and other packages' from warning up, under this process's name."""
    layout = f"%(asctime)s %(levelname)-7s {process}: %(message)s"
    logging.basicConfig(stream=sys.stderr, format=layout, datefmt="%H:%M:%S", force=True)
    logging.getLogger("tokenmill").setLevel(level.upper())
