"""OpenAI's client for Node against a real server with a random model: node/client.mjs has the tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server import Server

HERE = Path(__file__).parent / "node"
NODE = shutil.which("node")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(not (HERE / "node_modules").is_dir(), reason="npm's package openai is not: make clients"),
]


def test_the_client_for_node(server: Server) -> None:
    assert NODE is not None
    command = [NODE, "--test-reporter=tap", str(HERE / "client.mjs"), f"{server.base}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\n# fail 0\n" in ran.stdout
    assert "\n# pass 0\n" not in ran.stdout
