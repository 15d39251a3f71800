"""API keys: read once, kept as digests, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from tokenmill.errors import ConfigError, TokenmillError

MAX_KEYS = 10_000


class Unauthorized(TokenmillError):
    """A request without a valid key."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class Keys:
    """The keys that open the server; without any it is open to all."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def holder(self, shown: Sequence[str | None]) -> str:
        """A name for the key among those `shown` in headers, which tells nothing of it; "" where none is asked for.

        Raises Unauthorized: none of them is valid.
        """
        if not self._digests:
            return ""
        holder = ""
        for given in filter(None, shown):
            digest = _digest(given.encode("latin-1", "replace"))
            for number, known in enumerate(self._digests, 1):  # all of them: the time must not tell which one matched
                if hmac.compare_digest(digest, known):
                    holder = f"key-{number}"
        if not holder:
            raise Unauthorized(
                "the API key is not valid: check it"
                if any(shown)
                else "this server asks for an API key: send Authorization: Bearer KEY, or x-api-key: KEY"
            )
        return holder


def _digest(secret: bytes) -> bytes:
    return sha256(secret).digest()


def read_keys(given: Sequence[str], file: str | None) -> Keys:
    """The keys of the command line and of `file`.

    Raises ConfigError: the file cannot be read or holds none, or a key cannot stand in a header. No key is shown.
    """
    found = [(f"--api-key number {number}", key) for number, key in enumerate(given, 1)]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(f"--api-key-file {file} cannot be read: {reason}") from None
        stripped = [(f"--api-key-file {file}, line {number}", line.strip()) for number, line in enumerate(lines, 1)]
        from_file = [(where, key) for where, key in stripped if key and not key.startswith("#")]
        if not from_file:
            raise ConfigError(f"--api-key-file {file} holds no key: write one a line, or leave the flag out")
        found += from_file
    if len(found) > MAX_KEYS:
        raise ConfigError(f"{len(found)} API keys are over {MAX_KEYS}")
    for where, key in found:
        if not (key.isascii() and key.isprintable() and key.strip() and " " not in key):
            raise ConfigError(f"{where} is not usable as a key: it must be printable ASCII without spaces")
    return Keys(key for _, key in found)
