"""Ranks that were not started alike are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.sched.support import make_config
from tokenmill.engine.load import _compare
from tokenmill.errors import ConfigError
from tokenmill.spec import ModelSpec

SPEC = ModelSpec("llama", 100, 32, 64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, max_position=64)


def group(size, *others):
    """A group that hears from the others what `_compare` says of their configurations."""
    said = []
    for config, spec in others:
        alone = SimpleNamespace(size=2, exchange=lambda what, words: said.append(words) or [words])
        _compare(config, spec, alone)
    return SimpleNamespace(size=size, exchange=lambda what, words: [words, *said])


def test_ranks_with_one_configuration_start():
    config = make_config()
    _compare(config, SPEC, group(2, (replace(config, threads=7), SPEC)))
    _compare(config, SPEC, SimpleNamespace(size=1))


@pytest.mark.parametrize("change", [{"page_size": 8}, {"policy": "shortest"}, {"max_running": 9}])
def test_ranks_with_other_flags_do_not(change):
    config = make_config()
    with pytest.raises(ConfigError, match="the ranks have different flags"):
        _compare(config, SPEC, group(3, (config, SPEC), (replace(config, **change), SPEC)))
    with pytest.raises(ConfigError, match="different flags, models or versions"):
        _compare(config, SPEC, group(2, (config, replace(SPEC, num_layers=2))))
