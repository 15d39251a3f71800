"""Requests that wait, in the order of a policy, and what tenants were served."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from tokenmill.sched.policy import Policy
from tokenmill.sched.request import Request

WINDOW = 64
PATIENCE = 64
RANKING_USES = 8


class Ledger:
    """Tokens served to each tenant: the QueueView that policies read.

    A tenant that comes, or comes back, starts at the least of those present, so that idleness earns no credit. Tenants
    that left are remembered only while they are above that.
    """

    def __init__(self) -> None:
        self.now = 0
        self._served: dict[str, int] = {}
        self._present: dict[str, int] = {}

    def served(self, tenant: str) -> int:
        """Tokens computed for a tenant, those that its running requests are expected to take included."""
        return self._served.get(tenant, 0)

    def enter(self, tenant: str) -> None:
        """A request came."""
        present = self._present
        if tenant not in present:
            least = min([self._served[its] for its in present], default=None)
            start = 0 if least is None else max(least, self.served(tenant))
            if least is None or len(self._served) > 2 * len(present) + 64:
                remembered = {
                    its: tokens for its, tokens in self._served.items() if least is not None and tokens > least
                }
                self._served = {its: self._served[its] for its in present} | remembered
            self._served[tenant] = start
        present[tenant] = present.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request left."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]

    def charge(self, request: Request, tokens: int) -> None:
        """Have a request's tenant pay `tokens` for it in all."""
        self._served[request.tenant] += tokens - request.charged
        request.charged = tokens


class WaitingQueue:
    """Waiting requests in the order of a policy. Written only by the scheduler.

    A static policy's keys are kept sorted. Another's are asked only when a request can be admitted, of WINDOW requests
    at most: to look thousands of prompts up in the prefix tree for every admission would cost more than a step. The
    window is the oldest requests, or, for a policy by tenant, the first of each tenant, of the tenants that have
    waited longest since their last turn. A ranking by hits serves RANKING_USES admissions.

    Under a policy that is not static nobody starves: when the oldest of the window has been passed PATIENCE times, it
    is next, and one that is next and finds no room is not passed (see Admission).
    """

    def __init__(self, policy: Policy, ledger: Ledger, look_up: Callable[[Request], object]) -> None:
        self.num_tokens = 0  # known tokens of all that wait
        self._policy = policy
        self._ledger = ledger
        self._look_up = look_up  # brings hit_len up to date
        self._groups: dict[str, list[Request]] = {}
        self._size = 0
        self._num_passed = 0
        self._ranking: list[Request] = []
        self._uses_left = 0

    def __len__(self) -> int:
        return self._size

    def add(self, request: Request) -> bool:
        """Put a request in its place; says whether it is certain to be the first now."""
        if self._policy.is_static:
            request.place = self._policy.order(request, self._ledger)
        group = self._groups.setdefault(self._group_of(request), [])
        insort(group, request, key=_place)
        if self._ranking and len(self._ranking) < WINDOW:
            self._ranking.append(request)
        self.num_tokens += request.total_len
        self._size += 1
        return self._policy.is_static and group[0] is request

    def remove(self, request: Request) -> None:
        """Take a request out that is not to run."""
        name = self._group_of(request)
        group = self._groups[name]
        group.remove(request)
        if not group:
            del self._groups[name]
        self.num_tokens -= request.total_len
        self._size -= 1
        if request in self._ranking:
            self._ranking.remove(request)

    def take(self, request: Request) -> None:
        """Take a request out that runs now."""
        oldest = next(iter(self._groups.values()))[0]
        self._num_passed = 0 if request is oldest else self._num_passed + 1
        self._uses_left -= 1
        self.remove(request)
        name = self._group_of(request)
        if name in self._groups:  # the tenants that wait longest stay in front
            self._groups[name] = self._groups.pop(name)

    def first(self, is_held: Callable[[Request], bool]) -> Request | None:
        """The request to admit next, of those that are not held back; None when there is none in the window."""
        if not self._groups:
            return None
        if self._policy.is_static:
            (group,) = self._groups.values()
            return next((request for request in islice(group, WINDOW) if not is_held(request)), None)
        if self._num_passed >= PATIENCE:
            oldest = next(iter(self._groups.values()))[0]
            if not is_held(oldest):
                return oldest
        if self._policy.by_tenant:
            heads = (_first_free(group, is_held) for group in islice(self._groups.values(), WINDOW))
            return min((request for request in heads if request), key=self._rank, default=None)
        if self._uses_left <= 0 or not self._ranking:
            (group,) = self._groups.values()
            self._ranking = group[:WINDOW]
            for request in self._ranking:
                self._look_up(request)
            self._ranking.sort(key=self._rank)
            self._uses_left = RANKING_USES
        return _first_free(self._ranking, is_held)

    def ahead(self, request: Request) -> Sequence[Request]:
        """Waiting requests that are certain to run before one that is not in the queue yet."""
        if self._policy.is_static:
            request.place = self._policy.order(request, self._ledger)
        elif not self._policy.by_tenant:
            return ()
        group = self._groups.get(self._group_of(request), [])
        return group[: bisect(group, _place(request), key=_place)]

    def _group_of(self, request: Request) -> str:
        return request.tenant if self._policy.by_tenant else ""

    def _rank(self, request: Request) -> tuple[Any, int]:
        return self._policy.order(request, self._ledger), request.arrival


def _place(request: Request) -> tuple[Any, int]:
    return request.place, request.arrival


def _first_free(requests: Iterable[Request], is_held: Callable[[Request], bool]) -> Request | None:
    return next((request for request in islice(requests, WINDOW) if not is_held(request)), None)
