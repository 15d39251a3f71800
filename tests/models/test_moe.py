"""Mixtures of experts: what other families have not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.oracle import Oracle
from tests.models.test_families import PROMPT, assert_near, harness_of
from tests.support.families import MIXTURES, make_family
from tests.support.harness import Harness
from tests.support.ranks import run_ranks
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint


def test_stacks_of_experts_are_read(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "qwen3_moe", is_stacked=True)
    assert_near(harness_of(folder).logits([(0, 0, PROMPT)], of_all_tokens=True), Oracle(folder).logits(PROMPT))


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_together_compute_what_one_does(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path, name)

    def logits(group: Group) -> Tensor:
        checkpoint = open_checkpoint(folder)
        backends = make_backends("reference", checkpoint.spec)
        model = load_model(checkpoint, dtype=torch.float32, group=group, attention=backends)
        return Harness(model, backends).logits([(0, 0, PROMPT)], of_all_tokens=True)

    expected = logits(Group.solo())
    for found in run_ranks(2, logits):
        assert_near(found, expected)
