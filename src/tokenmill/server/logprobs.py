"""The JSON of logprobs: OpenAI's for chats and for completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.types import Logprob, TokenLogprobs

Json = dict[str, Any]


def chat_logprobs(entries: Sequence[TokenLogprobs] | None) -> Json | None:
    """Chat completions' object."""
    if entries is None:
        return None
    content = [_chat_token(its.token) | {"top_logprobs": [_chat_token(top) for top in its.top]} for its in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprobs] | None) -> Json | None:
    """Completions' object: columns. The token itself is among the likeliest, also when it is not one of them."""
    if entries is None:
        return None
    return {
        "tokens": [its.token.text for its in entries],
        "token_logprobs": [its.token.logprob for its in entries],
        "top_logprobs": [
            None if its.token.logprob is None else {each.text: each.logprob for each in (*its.top, its.token)}
            for its in entries
        ],
        "text_offset": [its.offset for its in entries],
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs]) -> list[Json | None]:
    """For each token of a prompt what there is by token id; null for the first."""
    return [
        None
        if its.token.logprob is None
        else {
            str(each.token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.text}
            for each in (its.token, *its.top)
        }
        for its in entries
    ]


def _chat_token(its: Logprob) -> Json:
    return {"token": its.text, "logprob": its.logprob, "bytes": list(its.data)}
