"""Policies of a user's own that change their mind all the time."""

from __future__ import annotations

from tokenmill.sched.policy import Policy


def fickle(request, queue):
    """Keys that depend on everything and mean nothing."""
    return (request.uid * 7919 + queue.now * 31 + request.computed_len + queue.served(request.tenant)) % 11


def mixed(request, queue):
    """A tuple, as keys may be."""
    return request.priority % 3, request.hit_len - request.max_len


BOTH = Policy(fickle, keep=mixed)
