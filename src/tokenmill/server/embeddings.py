"""/v1/embeddings: its requests and their answers."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.server.fields import EMBEDDING
from tokenmill.server.protocol import PLAIN, Fields, GenerationRequest, VectorForm, prompts_of, shared_of
from tokenmill.server.shapes import Json, Shape
from tokenmill.text.dialect import Dialect
from tokenmill.types import SamplingParams
from tokenmill.wire.messages import TextDelta


def parse_embedding(
    body: dict[str, Any], defaults: Mapping[str, Any], now: int = 0, dialect: Dialect = PLAIN
) -> GenerationRequest:
    """A /v1/embeddings request; see `parse_chat`."""
    fields = Fields(body, EMBEDDING)
    prompts = prompts_of(fields.raw("input"), "input")
    vectors = VectorForm(fields.take("dimensions"), fields.take("encoding_format") == "base64")
    params = SamplingParams(max_tokens=0, temperature=0, pooling=defaults.get("pooling", "last"))
    return GenerationRequest(
        prompts=prompts, params=params, vectors=vectors, names={"prompt": "input"}, **shared_of(fields, now)
    )


class EmbeddingShape(Shape):
    """/v1/embeddings."""

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """See `Shape.whole`. Raises InvalidRequest: more numbers are asked for than there are."""
        count = self._generation.usage.prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": shown(its[-1].embedding, self._call.vectors)}
            for index, its in enumerate(deltas)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._head.model, "usage": usage} | self._timings()


def shown(vector: bytes, form: VectorForm) -> list[float] | str:
    """A vector of float32 bytes as it is asked for; see `EmbeddingShape.whole`."""
    numbers = array("f", vector)
    if form.dimensions is not None:
        if form.dimensions > len(numbers):
            words = f"dimensions must be at most {len(numbers)}, as many as this model's embeddings have"
            raise InvalidRequest(words, "dimensions")
        numbers = numbers[: form.dimensions]
        length = math.hypot(*numbers) or 1.0
        numbers = array("f", [number / length for number in numbers])
    return base64.b64encode(numbers).decode() if form.is_base64 else numbers.tolist()
