"""Prompts as Python programs give them, to jobs for a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from tokenmill.errors import InvalidRequest
from tokenmill.text.messages import check_messages
from tokenmill.types import SamplingParams, Scheduling
from tokenmill.wire import messages as wire

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def is_ids(prompt: Any) -> TypeGuard[Sequence[int]]:
    """Whether the prompt is one of token ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int)


def tokenize_job(
    uids: list[int], prompt: Any, params: SamplingParams, scheduling: Scheduling, template: Mapping[str, Any]
) -> wire.TokenizeJob:
    """A job of a text, token ids, or chat messages, which go into a template with what `template` holds.

    Raises InvalidRequest: the prompt is none of these, or a message is wrong.
    """
    return wire.TokenizeJob(uids=uids, params=params, scheduling=scheduling, **_prompt_fields(prompt, template))


def _prompt_fields(prompt: Any, template: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if is_ids(prompt):
        try:
            return {"token_ids": wire.pack_ids(prompt)}
        except (OverflowError, TypeError) as error:
            words = f"prompt token ids must be whole numbers below 2**31: {error}"
            raise InvalidRequest(words, "prompt") from None
    if not prompt or not all(isinstance(message, Mapping) for message in prompt):
        raise InvalidRequest("a prompt must be a text, a list of token ids, or a list of chat messages", "prompt")
    messages = check_messages([dict(message) for message in prompt])
    named = {"tools", "add_generation_prompt", "continue_final_message"}
    known = {name: value for name, value in template.items() if name in named}
    if known.get("continue_final_message"):
        known.setdefault("add_generation_prompt", False)
    rest = {name: value for name, value in template.items() if name not in named}
    return {"chat": wire.ChatPrompt(messages=messages, template_kwargs=rest, **known)}
