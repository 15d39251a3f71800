"""The matrix with one row a token: ids to vectors at the input, vectors to logits at the output."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tokenmill.layers.build import Build, Source, Sources
from tokenmill.ops.api import Hidden, Norm
from tokenmill.parallel.shard import split_vocabulary


class VocabularyMatrix:
    """Each rank has the rows of some tokens. With tied embeddings one matrix does both jobs."""

    def __init__(self, build: Build) -> None:
        spec, group = build.spec, build.group
        self._ops, self._group, self._vocab_size, self._cap = build.ops, group, spec.vocab_size, spec.logits_cap
        self._tokens, rows = split_vocabulary(spec.vocab_size, group.rank, group.size)
        self.weight = build.parameter(rows, spec.hidden_size)
        self.weight[self._tokens.size :] = 0  # padding, which no checkpoint fills

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [tokens] to vectors [tokens, hidden]."""
        if self._group.size == 1:
            return F.embedding(ids, self.weight)
        is_elsewhere = (ids < self._tokens.start) | (ids >= self._tokens.stop)  # [tokens]
        vectors = F.embedding((ids - self._tokens.start).masked_fill(is_elsewhere, 0), self.weight)
        return self._group.all_reduce(vectors.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, hidden: Hidden, norm: Norm) -> Tensor:
        """The hidden state of sampled tokens, normalised first, to all logits [sampled, vocab] on every rank."""
        logits = self._group.all_gather(self._ops.normed_linear(hidden, self.weight, norm=norm))
        logits = logits[:, : self._vocab_size]
        return logits.div_(self._cap).tanh_().mul_(self._cap) if self._cap else logits

    def sources(self, name: str) -> Sources:
        """Where the tensor called `name` goes."""
        shape = (self._vocab_size, self.weight.shape[1])
        return {f"{name}.weight": Source(self.weight[: self._tokens.size], shape, self._tokens)}
