"""Every error that a user can cause, as one small tree.

    TokenmillError
    ├── InvalidRequest        400, names the field
    │   ├── RequestTooLong    400, prompt or output over what the model or the pool can hold
    │   └── UnsupportedField  400, a field that is known but not honoured yet
    ├── ModelNotFound         404 over HTTP; exit 2 on the command line
    ├── ModelUnreadable       a file that is truncated, damaged, or of an unknown kind
    ├── Overloaded            503, with retry_after
    │   └── DeadlinePassed    504, the request's own deadline
    ├── ConfigError           a flag or an environment variable that cannot work
    ├── StartFailed           a process did not become ready; carries its reason
    ├── RanksDisagree         schedulers that were told the same made different plans
    ├── RankLost              a rank died, hangs, or cannot be reached
    └── WorkerDied            a process ended while requests were running

``server.errors`` maps them to HTTP in one place, ``cli`` to one line on stderr and an exit code.
"""

from __future__ import annotations


class TokenmillError(Exception):
    """Base of all errors with a message fit for a user: what was wrong, what to do."""

    status = 500
    kind = "InternalServerError"
    param: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(TokenmillError):
    """A request that cannot be honoured; `param` names the field at fault."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLong(InvalidRequest):
    """Prompt plus output does not fit the model's context or the K/V pool."""


class UnsupportedField(InvalidRequest):
    """A field of the API that is not honoured; refused rather than ignored."""


class ModelNotFound(TokenmillError):
    """No model under this name; the message tells what was tried."""

    status = 404
    kind = "NotFoundError"
    param = "model"


class ModelUnreadable(TokenmillError):
    """A model file that exists but cannot be used."""


class Overloaded(TokenmillError):
    """No room for one more request, or not in time. `retry_after` is in seconds.

    `reason` is "requests" or "tokens" where the queue has no room for more of them, "deadline" if it could not be met.
    """

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after: int = 1, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class DeadlinePassed(Overloaded):
    """A request's deadline came before its first token."""

    status = 504
    kind = "DeadlinePassedError"

    def __init__(self) -> None:
        super().__init__("the request's deadline passed before its first token", reason="deadline")


class ConfigError(TokenmillError):
    """A flag, file or environment value that cannot work."""


class StartFailed(TokenmillError):
    """A process could not start; the message carries its reason."""


class RanksDisagree(TokenmillError):
    """Schedulers that were told the same made different plans."""


class RankLost(TokenmillError):
    """A rank died, hangs, or cannot be reached."""


class WorkerDied(TokenmillError):
    """A process ended while it was needed."""
