"""transformers as the oracle: logits in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor


class Oracle:
    """A transformers model of the same files."""

    def __init__(self, folder: Path, **options: Any) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        self._model = model.eval()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[tokens, vocab]."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(ids)])).logits[0]

    def final_states(self, ids: Sequence[int]) -> Tensor:
        """[tokens, hidden], normalised as the logits' input is."""
        with torch.inference_mode():
            states: Tensor = self._model.model(torch.tensor([list(ids)])).last_hidden_state[0]
            return states

    def is_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """True when each id of `output` is the likeliest after all before it."""
        logits = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        return logits.argmax(-1).tolist() == list(output)
