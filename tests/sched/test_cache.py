from __future__ import annotations

from tokenmill.sched.cache import PrefixCache
from tokenmill.wire.messages import pack_ids


def test_duplicates_stay_behind_the_fence_until_the_step_is_done():
    cache = PrefixCache(num_pages=8, page_size=2)
    ids = pack_ids([1, 2, 3, 4, 5])
    first, second = cache.open(1, ids, ""), cache.open(2, ids, "")
    cache.extend(first, 5)
    cache.extend(second, 5)
    duplicates = second.pages[:2]
    assert cache.share(first, ids, 5, last_step=0) is None
    assert cache.share(second, ids, 5, last_step=7) == (0, first.pages[:2])
    cache.check()
    assert set(duplicates).isdisjoint(cache.free_pages())
    cache.retire(6)
    assert set(duplicates).isdisjoint(cache.free_pages())
    cache.retire(7)
    assert set(duplicates) <= set(cache.free_pages())
    cache.check()


def test_last_token_is_never_part_of_a_hit():
    cache = PrefixCache(num_pages=8, page_size=1)
    ids = pack_ids([1, 2, 3])
    cache.extend(cache.open(1, ids, ""), 3)
    cache.close(1, ids, 3)
    assert cache.hit(ids, "")[0] == 2
    assert cache.hit(pack_ids([1, 2, 3, 4]), "")[0] == 3


def test_salts_do_not_share():
    cache = PrefixCache(num_pages=8, page_size=1)
    ids = pack_ids([1, 2, 3])
    cache.extend(cache.open(1, ids, "a"), 3)
    cache.close(1, ids, 3)
    assert cache.hit(ids, "b") == (0, 0)
    assert cache.hit(ids, "a") == (2, 2)


def test_eviction_takes_the_least_recently_used_tail_first():
    cache = PrefixCache(num_pages=6, page_size=1)
    old, new = pack_ids([1, 2, 3]), pack_ids([7, 8, 9])
    for uid, ids in enumerate((old, new)):
        cache.extend(cache.open(uid, ids, ""), 3)
        cache.close(uid, ids, 3)
    lease = cache.open(9, pack_ids([5, 5]), "")
    assert cache.extend(lease, 2) is not None
    longer = pack_ids([1, 2, 3, 0])
    assert cache.hit(longer, "")[0] == 1
    assert cache.hit(pack_ids([7, 8, 9, 0]), "")[0] == 3
    cache.check()


def test_locked_pages_are_never_evicted():
    cache = PrefixCache(num_pages=4, page_size=1)
    ids = pack_ids([1, 2, 3, 4])
    cache.extend(cache.open(1, ids, ""), 3)
    cache.close(1, ids, 3)
    holder = cache.open(2, ids, "")
    assert holder.shared == 3
    assert cache.extend(cache.open(3, pack_ids([9, 9]), ""), 2) is None
    assert cache.num_available == 1
    cache.check()


def test_flush_forgets_what_nobody_uses():
    cache = PrefixCache(num_pages=4, page_size=1)
    ids = pack_ids([1, 2, 3])
    cache.extend(cache.open(1, ids, ""), 3)
    cache.close(1, ids, 3)
    assert cache.flush() == 3
    assert cache.num_free == 4
    assert cache.hit(ids, "") == (0, 0)
