"""Chat messages to ids. Text of users and tools that looks like a special token stays text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tokenmill.errors import InvalidRequest
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.wire.messages import ChatPrompt

UNTRUSTED_ROLES = frozenset({"user", "tool"})
PRIVATE_USE = range(0xF0000, 0xFFFFE)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate | None, prompt: ChatPrompt, check_length: Callable[[str], None]
) -> list[int]:
    """The ids of a chat prompt; the template itself writes bos.

    Messages of the system and the assistant may hold special tokens: clients send back what a model has written.
    Raises InvalidRequest when there is no template, it cannot show the messages, or `check_length` refuses their text.
    """
    if template is None:
        raise InvalidRequest(
            "the model has no chat template: give one with --chat-template FILE, or use /v1/completions", "messages"
        )
    prompt, plain = _mask(prompt, tokenizer.special_pattern)
    text = template.render(prompt)
    check_length(text.translate({ord(letter): shown for letter, shown in plain.items()}))
    if plain:
        return tokenizer.encode_masked(text, plain)
    return tokenizer.encode(text, add_special_tokens=False)


def _mask(prompt: ChatPrompt, special: re.Pattern[str]) -> tuple[ChatPrompt, dict[str, str]]:
    """Put an unused letter for each special token's text that a user or a tool wrote; also return what each stands for.

    A template may cut, strip and join texts, but does not change such a letter.
    """
    found: dict[str, None] = {}
    untrusted = [message for message in prompt.messages if message["role"] in UNTRUSTED_ROLES]
    documents = prompt.template_kwargs.get("documents")
    for part in (*untrusted, prompt.tools, documents):
        _map_texts(part, lambda text: found.update(dict.fromkeys(special.findall(text))) or text)
    if not found:
        return prompt, {}
    used = set(json.dumps([prompt.messages, prompt.tools, prompt.template_kwargs], ensure_ascii=False))
    letters = itertools.filterfalse(used.__contains__, map(chr, PRIVATE_USE))
    masks = dict(zip(found, letters, strict=False))

    def mask(value: Any) -> Any:
        return _map_texts(value, lambda text: special.sub(lambda match: masks[match[0]], text))

    masked = replace(
        prompt,
        messages=[mask(message) if message["role"] in UNTRUSTED_ROLES else message for message in prompt.messages],
        tools=mask(prompt.tools),
        template_kwargs={**prompt.template_kwargs, **({"documents": mask(documents)} if documents else {})},
    )
    return masked, {letter: text for text, letter in masks.items()}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return value
