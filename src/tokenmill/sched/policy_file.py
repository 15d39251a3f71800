"""Policies by name, and from a user's own file."""

from __future__ import annotations

import importlib.util
import sys
from array import array
from dataclasses import replace
from pathlib import Path

from tokenmill.errors import ConfigError
from tokenmill.sched.policy import POLICIES, Key, Order, Policy, QueueView, RequestView
from tokenmill.sched.queue import Ledger
from tokenmill.sched.request import Request
from tokenmill.types import SamplingParams

HOW = "an order takes (request, queue) and returns a number or a tuple of numbers, the smallest for what goes first"


def load_policy(name: str) -> Policy:
    """The policy called `name`, or what `path.py:function` names: an order, or a Policy.

    Orders from files are tried on two requests, and whatever they raise later is a ConfigError too.

    Raises:
        ConfigError: no such policy or file, or it is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not attribute:
        raise ConfigError(f"--policy {name} is unknown: use {', '.join(POLICIES)}, or path.py:function")
    found = _read(name, Path(path), attribute)
    policy = found if isinstance(found, Policy) else Policy(_checked(name, found))
    if policy is found:
        policy = replace(policy, order=_checked(name, policy.order), keep=_checked(name, policy.keep))
    ledger = Ledger()
    probes = [Request(uid, array("i", (1, 2)), 1, 4, SamplingParams(), frozenset(), priority=uid) for uid in (0, 1)]
    probes[1].deadline = 1000
    for order in (policy.order, policy.keep):
        keys = [order(request, ledger) for request in probes]
        try:
            sorted(keys)
        except TypeError as error:
            raise ConfigError(f"--policy {name} returns keys that cannot be compared: {error}; {HOW}") from None
    return policy


def _read(name: str, path: Path, attribute: str) -> object:
    spec = importlib.util.spec_from_file_location("tokenmill_policy", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--policy {name}: there is no file {path}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--policy {name}: {path} cannot be run: {error!r}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"--policy {name}: {path} has no {attribute}")
    return getattr(module, attribute)


def _checked(name: str, order: object) -> Order:
    """`order` with a clear error for whatever goes wrong in it."""
    if not callable(order):
        raise ConfigError(f"--policy {name} is not a function; {HOW}")

    def checked(request: RequestView, queue: QueueView) -> Key:
        try:
            key: Key = order(request, queue)
        except Exception as error:
            raise ConfigError(f"--policy {name} failed: {error!r}; {HOW}") from error
        if not all(
            isinstance(part, int | float) and part == part for part in (key if isinstance(key, tuple) else (key,))
        ):
            raise ConfigError(f"--policy {name} returned {key!r}; {HOW}")
        return key

    return checked
