from __future__ import annotations

import json

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.sched.cache import MAX_PINS, PrefixCache
from tokenmill.sched.dump import CacheCounters, Probe, as_text, salt_hash
from tokenmill.wire.messages import pack_ids


def keep(cache, ids, salt="", uid=-1, priority=0):
    """A request with these ids comes, computes them and goes."""
    token_ids = pack_ids(ids)
    assert cache.extend(cache.open(uid, token_ids, salt, priority), len(ids)) is not None
    cache.close(uid, token_ids, len(ids))
    cache.check()


def known(cache, ids, salt=""):
    return cache.probe(pack_ids(ids), salt).known


def test_duplicates_stay_behind_the_fence_until_the_step_is_done():
    cache = PrefixCache(num_pages=8, page_size=2)
    ids = pack_ids([1, 2, 3, 4, 5])
    first, second = cache.open(1, ids, ""), cache.open(2, ids, "")
    cache.extend(first, 5)
    cache.extend(second, 5)
    duplicates = second.pages[:2]
    assert cache.share(first, ids, 5, last_step=0) is None
    assert cache.share(second, ids, 5, last_step=7) == (0, 2)
    assert second.pages[:2] == first.pages[:2]
    cache.check()
    assert set(duplicates).isdisjoint(cache.free_pages())
    owners = {"free": 2, "tree": 2, "private": 2, "fence": 2, "evictable": 0, "pinned": 0}
    assert cache.pages_by_owner() == owners
    cache.retire(6)
    assert set(duplicates).isdisjoint(cache.free_pages())
    cache.retire(7)
    assert set(duplicates) <= set(cache.free_pages())
    cache.check()


def test_last_token_is_never_part_of_a_hit():
    cache = PrefixCache(num_pages=8, page_size=1)
    keep(cache, [1, 2, 3])
    assert cache.hit(pack_ids([1, 2, 3]), "")[0] == 2
    assert cache.hit(pack_ids([1, 2, 3, 4]), "")[0] == 3


def test_salts_do_not_share():
    cache = PrefixCache(num_pages=8, page_size=1)
    keep(cache, [1, 2, 3], "a")
    assert cache.hit(pack_ids([1, 2, 3]), "b") == (0, 0)
    assert cache.hit(pack_ids([1, 2, 3]), "a") == (2, 2)


def test_eviction_takes_the_least_recently_used_tail_first():
    cache = PrefixCache(num_pages=6, page_size=1)
    keep(cache, [1, 2, 3])
    keep(cache, [7, 8, 9])
    lease = cache.open(9, pack_ids([5, 5]), "")
    assert cache.extend(lease, 2) is not None
    assert (known(cache, [1, 2, 3]), known(cache, [7, 8, 9])) == (1, 3)
    assert cache.counters.evicted_pages == 2
    cache.check()


def test_locked_pages_are_never_evicted():
    cache = PrefixCache(num_pages=4, page_size=1)
    keep(cache, [1, 2, 3])
    holder = cache.open(2, pack_ids([1, 2, 3, 4]), "")
    assert holder.shared == 3
    assert cache.extend(cache.open(3, pack_ids([9, 9]), ""), 2) is None
    assert cache.num_available == 1
    cache.check()


def test_flush_forgets_what_nobody_uses_of_one_salt_or_of_all():
    cache = PrefixCache(num_pages=12, page_size=1)
    for salt in ("", "a", "b"):
        keep(cache, [1, 2, 3], salt)
    cache.open(1, pack_ids([1, 2, 9]), "a")
    cache.pin(pack_ids([1, 2]), "b", 5)
    assert cache.flush("") == 3
    assert cache.flush() == 2
    assert [known(cache, [1, 2, 3], salt) for salt in ("", "a", "b")] == [0, 2, 2]
    assert cache.flush("a", with_pins=True) == 0
    assert cache.flush(with_pins=True) == 2
    assert cache.num_free == 10
    cache.check()


def test_without_a_prefix_cache_nothing_is_kept_or_found():
    cache = PrefixCache(num_pages=4, page_size=1, is_enabled=False)
    ids = pack_ids([1, 2, 3])
    lease = cache.open(0, ids, "")
    cache.extend(lease, 3)
    assert cache.share(lease, ids, 3, 0) is None
    assert cache.pin(ids, "", 9) == 0
    cache.close(0, ids, 3)
    assert (cache.num_free, cache.probe(ids, "")) == (4, Probe(0, 0, 0, 0))
    cache.check()


def test_a_pinned_prefix_outlives_others_until_its_time_has_come():
    cache = PrefixCache(num_pages=6, page_size=1)
    keep(cache, [1, 2, 3])
    assert cache.pin(pack_ids([1, 2, 3, 4]), "", until=100) == 3
    holder = cache.open(0, pack_ids([8]), "")
    assert (cache.num_available, cache.hit(pack_ids([1, 2, 3, 4]), "")) == (3, (3, 0))
    for first in range(10, 20):
        keep(cache, [first, 1, 2])
    assert cache.extend(cache.open(1, pack_ids([9] * 5), ""), 5) is None
    assert cache.probe(pack_ids([1, 2, 3]), "") == Probe(known=3, hit=2, pinned=3, in_use=0)
    cache.expire(99)
    assert cache.pages_by_owner()["pinned"] == 3
    cache.expire(100)
    assert cache.num_available == 6
    assert cache.extend(holder, 6) is not None
    assert (known(cache, [1, 2, 3]), cache.counters.yielded_pins) == (0, 0)
    cache.check()


def test_pins_yield_to_a_request_that_is_open_alone_and_the_one_that_ends_soonest_first():
    cache = PrefixCache(num_pages=8, page_size=1)
    for first, until in ((1, 30), (2, 10), (3, 20)):
        keep(cache, [first])
        cache.pin(pack_ids([first]), "", until)
    assert cache.num_available == 8
    lease = cache.open(0, pack_ids([2, 9]), "")
    assert cache.num_available == 5
    assert cache.extend(lease, 6) is not None
    assert [known(cache, [first]) for first in (1, 2, 3)] == [1, 1, 1]
    assert cache.extend(lease, 7) is not None
    assert [known(cache, [first]) for first in (1, 2, 3)] == [1, 1, 0]
    other = cache.open(1, pack_ids([4]), "")
    assert cache.extend(lease, 8) is None
    cache.close(1, pack_ids([4]), 0)
    assert other.pages == []
    assert cache.extend(lease, 9) is None
    assert cache.probe(pack_ids([1]), "").pinned == 1
    assert cache.extend(lease, 8) is not None
    assert [known(cache, [first]) for first in (1, 2, 3)] == [0, 1, 0]
    assert cache.counters.yielded_pins == 2
    cache.check()


def test_the_later_time_of_a_pin_counts_and_unpin_ends_it():
    cache = PrefixCache(num_pages=16, page_size=2)
    keep(cache, [1, 2, 3, 4, 5, 6])
    assert cache.pin(pack_ids([1, 2, 3]), "", until=50) == 2
    assert [cache.pin(pack_ids([1, 2, 3, 4, 5]), "", until) for until in (40, 70, 60)] == [4, 4, 4]
    cache.check()
    cache.expire(69)
    assert cache.probe(pack_ids([1, 2, 3, 4, 5, 6]), "") == Probe(known=6, hit=4, pinned=4, in_use=0)
    assert cache.unpin(pack_ids([1, 2, 3]), "") == 0
    assert cache.unpin(pack_ids([1, 2, 3, 4, 7, 8]), "") == 4
    assert (cache.unpin(pack_ids([1, 2, 3, 4]), ""), cache.pages_by_owner()["pinned"]) == (0, 0)
    assert (cache.pin(pack_ids([7, 8]), "", 5), cache.pin(pack_ids([1, 2]), "x", 5)) == (0, 0)
    assert cache.flush() == 3
    cache.check()


def test_pins_take_no_more_than_their_share():
    cache = PrefixCache(num_pages=8, page_size=1)
    keep(cache, [1, 2, 3])
    keep(cache, [1, 5, 6])
    cache.pin(pack_ids([1, 2, 3]), "", 10)
    with pytest.raises(InvalidRequest, match=r"5 tokens in 2 prefixes would be pinned; at most 4 of .* 8 tokens"):
        cache.pin(pack_ids([1, 5, 6]), "", 10)
    cache.check()
    assert cache.pin(pack_ids([1, 5]), "", 10) == 2
    assert cache.probe(pack_ids([1, 5, 6]), "").pinned == 2


def test_pins_are_counted_too():
    cache = PrefixCache(num_pages=4 * MAX_PINS, page_size=1)
    for first in range(MAX_PINS + 1):
        keep(cache, [first])
    for first in range(MAX_PINS):
        cache.pin(pack_ids([first]), "", first)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PINS} prefixes"):
        cache.pin(pack_ids([MAX_PINS]), "", 10)
    assert cache.pin(pack_ids([7]), "", 2 * MAX_PINS) == 1
    cache.expire(MAX_PINS)
    assert cache.pages_by_owner()["pinned"] == 1


def test_lookups_are_counted():
    cache = PrefixCache(num_pages=8, page_size=2)
    keep(cache, [1, 2, 3, 4])
    keep(cache, [1, 2, 3, 4, 5])
    keep(cache, [1, 2])
    cache.hit(pack_ids([1, 2, 3]), "")
    cache.probe(pack_ids([1, 2, 3]), "")
    assert cache.counters == CacheCounters(lookups=3, hits=1, misses=2, lookup_tokens=11, hit_tokens=4)


def dumped(**options):
    cache = PrefixCache(num_pages=64, page_size=2)
    keep(cache, range(24), "secret", priority=3)
    keep(cache, [0, 1, 2, 3, 9, 9], "secret")
    keep(cache, [7, 7])
    cache.pin(pack_ids([0, 1]), "secret", 500)
    cache.open(1, pack_ids([0, 1, 2, 3, 9, 9, 9]), "secret")
    return cache.dump(**options)


def test_the_dump_tells_of_each_node():
    assert dumped() == dumped()
    assert json.loads(json.dumps(dumped())) == dumped()
    assert as_text(dumped(has_salts=True)).splitlines() == [
        "page_size 2  time 3  pins 1  free 50  tree 14  private 0  fence 0  evictable 11  pinned 1",
        "salt secret",
        "  2 tokens [0 1]  uses 3  priority 3  last_used 2  locks 1  pins 1  pinned until 500 ms",
        "    2 tokens [2 3]  uses 3  priority 3  last_used 2  locks 1",
        "      20 tokens [4 5 6 7 8 9 10 11 ...]  uses 1  priority 3  last_used 1",
        "      2 tokens [9 9]  uses 2  last_used 2  locks 1",
        "salt (none)",
        "  2 tokens [7 7]  uses 1  last_used 3",
    ]


def test_salts_are_hashed_unless_asked_for():
    text = as_text(dumped())
    assert "secret" not in text
    assert f"salt {salt_hash('secret')}\n" in text


def test_the_dump_is_bounded_in_nodes_and_depth():
    assert as_text(dumped(max_depth=2)).splitlines()[2:] == [
        "  2 tokens [0 1]  uses 3  priority 3  last_used 2  locks 1  pins 1  pinned until 500 ms",
        "    2 tokens [2 3]  uses 3  priority 3  last_used 2  locks 1",
        "      ... 2 more",
        "salt (none)",
        "  2 tokens [7 7]  uses 1  last_used 3",
    ]
    lines = [line.strip().split(" ")[0] for line in as_text(dumped(max_nodes=3)).splitlines()]
    assert lines == ["page_size", "salt", "2", "...", "salt", "..."]
    assert as_text(dumped(max_nodes=0)).splitlines()[1:] == ["... 2 more"]
    assert as_text(dumped(max_nodes=1)).splitlines()[2:] == ["  ... 1 more", "... 1 more"]
