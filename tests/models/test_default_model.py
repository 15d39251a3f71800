from pathlib import Path

import pytest
import torch

from tests.models.oracle import Oracle
from tests.support.harness import Harness
from tokenmill.attention.select import make_backends
from tokenmill.models.load import load_model
from tokenmill.parallel.group import Group
from tokenmill.weights.checkpoint import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = {
    # "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    "chat": [1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198],
    # "def fibonacci(n):\n    "
    "code": [1604, 3987, 46477, 24, 94, 727, 2367],
    # "The"
    "one token": [504],
    # "Once upon a time there was a mill by a river, and in it lived a cat. ", many times
    "long": [6403, 1980, 253, 655, 665, 436, 253, 1663, 411, 253, 4626, 28, 284, 281, 357, 4161, 253, 2644, 30] * 30,
}


@pytest.fixture(scope="module")
def oracle(default_model: Path) -> Oracle:
    return Oracle(default_model.parent, gguf_file=default_model.name)


@pytest.fixture(scope="module")
def harness(default_model: Path) -> Harness:
    checkpoint = open_checkpoint(default_model)
    backend = make_backends("reference", checkpoint.spec)
    model = load_model(checkpoint, dtype=torch.float32, group=Group.solo(), attention=backend)
    return Harness(model, backend, slots=2, max_len=1024, page_size=16)


@pytest.mark.parametrize("name", PROMPTS)
def test_parity_with_transformers(name: str, oracle: Oracle, harness: Harness) -> None:
    prompt = PROMPTS[name]
    logits = harness.logits([(0, 0, prompt)], of_all_tokens=True)
    torch.testing.assert_close(logits, oracle.logits(prompt), atol=2e-3, rtol=0)
    assert oracle.is_greedy(prompt, harness.greedy(prompt, 64, slot=1))
