"""The JSON of embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence

from tokenmill.errors import InvalidRequest
from tokenmill.server.generation import Generation
from tokenmill.server.protocol import GenerationRequest, VectorForm
from tokenmill.server.shapes import Head, Json
from tokenmill.wire.messages import TextDelta


class EmbeddingShape:
    """/v1/embeddings."""

    def __init__(self, call: GenerationRequest, dialect: object) -> None:
        self._form = call.vectors

    def start(self, head: Head, generation: Generation) -> None:
        """See `Shape.start`."""
        self._head, self._generation = head, generation

    def whole(self, deltas: Sequence[Sequence[TextDelta]]) -> Json:
        """See `Shape.whole`. Raises InvalidRequest: more numbers are asked for than there are."""
        count = self._generation.usage.prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": shown(its[-1].embedding, self._form)}
            for index, its in enumerate(deltas)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        body = {"object": "list", "data": data, "model": self._head.model, "usage": usage}
        return body | {"timings": self._generation.timings} if self._head.has_timings else body


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
