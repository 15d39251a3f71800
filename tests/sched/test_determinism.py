"""Two schedulers in processes with different hash seeds, fed the same, make the same plans."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

from tests.sched.support import make_config
from tokenmill.errors import TokenmillError
from tokenmill.sched.plan import StepResult
from tokenmill.sched.policy import POLICIES
from tokenmill.sched.request import Request
from tokenmill.sched.scheduler import Scheduler
from tokenmill.types import SamplingParams
from tokenmill.wire.messages import pack_ids

STEPS = 10_000
ROOT = Path(__file__).parents[2]


def digest_of(num_steps: int, policy: str, seed: int) -> str:
    """A hash of all plans of a random run."""
    rng = random.Random(f"{policy}/{seed}")
    page_size, eviction = rng.choice((1, 4, 16)), rng.choice(("lru", "lfu", "priority"))
    config = make_config(policy=policy, num_pages=160 // page_size, page_size=page_size, eviction=eviction)
    scheduler, hashed, flights, steps, uid = Scheduler(config), hashlib.blake2b(), [], 0, 0
    while steps < num_steps:
        now = steps * 3
        if rng.random() < 0.1 and scheduler.num_waiting < 20:
            length = rng.randint(1, min(60, config.max_model_len - 60))
            fork = rng.choice((0, 16, 40))
            prompt = array("i", [i % 7 if i < fork else uid % 50 for i in range(length)])
            params = SamplingParams(seed=rng.randrange(9))
            request = Request(uid, prompt, length, length + rng.randint(1, 60), params, frozenset({1, 2, 3}))
            request.tenant, request.salt, request.priority = (
                rng.choice("abcd"),
                rng.choice(("", "s")),
                rng.randint(0, 2),
            )
            request.deadline = rng.choice((None, None, now + rng.randint(1, 300)))
            try:
                scheduler.add(request, now, 2000)
            except TokenmillError as error:
                hashed.update(error.message.encode())
            uid += 1
        if rng.random() < 0.02:
            scheduler.abort(rng.randint(max(0, uid - 20), uid))
        if rng.random() < 0.01:
            scheduler.cache.pin(pack_ids([i % 7 for i in range(16)]), "", now + 100)
        if len(flights) < 2 and (plan := scheduler.plan(now)):
            hashed.update(plan.digest().encode())
            flights.append(plan)
            steps += 1
        elif flights:
            plan = flights.pop(0)
            drawn = tuple((row.uid * 31 + row.start) % 61 for row in plan.rows if row.is_sampled)
            hashed.update(repr(scheduler.commit(plan, StepResult(plan.step, drawn))).encode())
    assert scheduler.counters.retractions
    assert scheduler.counters.cached_tokens
    return hashed.hexdigest()


def test_plans_do_not_depend_on_the_hash_seed_or_the_process():
    def start(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        return subprocess.Popen([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True)

    processes = [start("1"), start("2")]
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == len(POLICIES)


if __name__ == "__main__":
    for name in POLICIES:
        print(digest_of(STEPS, name, 0))
