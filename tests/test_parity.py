"""Our greedy tokens and prefill logits against transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.tiny_models import make_tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.sampling import base as sampling_base

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
TOLERANCE = 2e-3
PROSE = "The old lighthouse stood at the end of the pier, and every evening its keeper climbed the stairs. "
TEXTS = [
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "今日は天気がいいので、",
    "人工智能的未来是",
    "안녕하세요, 저는",
    "I love pizza 🍕 and 🎉 parties! 👨‍👩‍👧 ",
    "3.14159265358979 + 2.71828182845904 = ",
    "2 4 8 16 32 64 128",
    "The",
    " ",
    "\n\n\n\t\t- item\n\t\t- ",
    "Ünïcödé naïve café — “quoted” … ",
    PROSE * 100,
]


class Recorder:
    """Keeps the logits from which each step drew."""

    def __init__(self, monkeypatch):
        self.logits: list[torch.Tensor] = []
        sample = sampling_base.sample

        def spy(logits, *rest):
            self.logits.append(logits.clone())
            return sample(logits, *rest)

        monkeypatch.setattr(sampling_base, "sample", spy)


@torch.inference_mode()
def check(llm: LLM, oracle, prompts: list[list[int]], recorder: Recorder) -> None:
    """Feed the oracle prompt and our output at once: each of our tokens must be its likeliest at that place."""
    for prompt in prompts:
        recorder.logits.clear()
        output = llm.generate(prompt, GREEDY)[0].choices[0].token_ids
        assert len(output) == GREEDY.max_tokens
        expected = oracle(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
        assert output == expected.argmax(-1).tolist(), prompt[:20]
        assert (recorder.logits[0][0] - expected[0]).abs().max() <= TOLERANCE


@pytest.mark.model
@pytest.mark.slow
def test_default_model(default_model, monkeypatch):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()
    recorder = Recorder(monkeypatch)
    with LLM(default_model, dtype="float32", loop="serial") as llm:
        prompts = [llm.tokenizer.encode(text) for text in TEXTS]
        assert len(prompts) == 16
        assert min(map(len, prompts)) == 1
        assert max(map(len, prompts)) >= 2000
        check(llm, oracle, prompts, recorder)


ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_tiny_llama_past_its_original_length(tmp_path: Path, monkeypatch, kind):
    folder = make_tiny_llama(tmp_path, rope=ROPES[kind], max_position=256)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    recorder = Recorder(monkeypatch)
    prompts = [[4 + (i * 31 + length) % 250 for i in range(length)] for length in (1, 40, 63, 64, 65, 100, 190)]
    with LLM(folder, dtype="float32", loop="serial", prefill_budget=50) as llm:
        check(llm, oracle, prompts, recorder)
