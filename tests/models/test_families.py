"""Every family against transformers, from the files that transformers writes."""

from pathlib import Path

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.families import FAMILIES, make_family
from tests.support.harness import Harness
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

PROMPT = [(7 * i) % 251 + 4 for i in range(100)]
STEPS = 32


def harness_of(folder: Path) -> Harness:
    checkpoint = open_checkpoint(folder)
    backends = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backends)
    return Harness(model, backends)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path, name)
    oracle, harness = Oracle(folder), harness_of(folder)
    found = [harness.logits([(0, 0, PROMPT)], of_all_tokens=True)]
    ids = list(PROMPT)
    for _ in range(STEPS):
        ids.append(int(found[-1][-1].argmax()))
        found.append(harness.logits([(0, len(ids) - 1, ids[-1:])]))
    assert oracle.is_greedy(PROMPT, ids[len(PROMPT) :])
    expected = oracle.logits(ids)
    assert_near(torch.cat(found), expected)
    harness.logits([(1, 0, ids[:7]), (0, 0, ids[:3])])
    chunks = [harness.logits([(2, 0, ids[:9]), (1, a, ids[a:b])]) for a, b in ((7, 60), (60, 61), (61, 132))]
    assert_near(torch.stack([chunk[1] for chunk in chunks]), expected[[59, 60, 131]])
