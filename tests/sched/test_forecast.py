"""The predicted peak against a simulation of it, and what is learned of outputs."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.sched.support import request_for
from tokenmill.sched.forecast import MAX_START_OUTPUT, ONE, OutputEstimate, peak_fits

REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6
)  # tokens to draw, known tokens, pages held, of which its end releases


def simulated_peak(requests, page_size):
    """Pages taken beside those held now, at most: each draws a token a step, and ends after its last."""
    most = 0
    for step in range(max(draws for draws, *_ in requests) + 1):
        taken = 0
        for draws, known, held, released in requests:
            taken += -(-(known + step) // page_size) - held if draws >= step else -released
        most = max(most, taken)
    return most


def fits(requests, page_size, available):
    return peak_fits([(d, known - held * page_size, r) for d, known, held, r in requests], page_size, available)


def clean(requests, page_size):
    """No more pages held than the known tokens take, none released that is not held."""
    held = [(d, k, min(h, -(-k // page_size)), r) for d, k, h, r in requests]
    return [(d, k, h, min(r, h)) for d, k, h, r in held]


@given(REQUESTS, st.integers(1, 5), st.integers(0, 30))
@example([(5, 0, 0, 0), (1, 4, 4, 4)], 1, 3)
def test_what_has_room_never_takes_more_than_is_there(requests, page_size, available):
    requests = clean(requests, page_size)
    if fits(requests, page_size, available):
        assert simulated_peak(requests, page_size) <= available


@given(REQUESTS, st.integers(0, 30))
def test_with_pages_of_one_token_nothing_that_fits_is_refused(requests, available):
    requests = clean(requests, 1)
    assert fits(requests, 1, available) == (simulated_peak(requests, 1) <= available)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 8))
def test_one_alone_fits_exactly_its_pages(draws, known, page_size):
    pages = -(-(draws + known) // page_size)
    assert fits([(draws, known, 0, 0)], page_size, pages)
    assert not fits([(draws, known, 0, 0)], page_size, pages - 1)


def test_pages_that_ends_release_count():
    ends_soon, new = (1, 8, 2, 2), (12, 4, 0, 0)
    assert fits([ends_soon, new], 4, 3)
    assert not fits([(1, 8, 2, 0), new], 4, 3)


def ended(drawn, limit, prompt=3):
    request = request_for(0, [1] * prompt, limit)
    request.token_ids.extend([1] * drawn)
    return request


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), max_size=60), st.floats(0, 1))
def test_an_estimate_stays_within_what_may_be_drawn(lengths, share):
    estimate = OutputEstimate(share)
    for drawn, limit in lengths:
        estimate.learn(ended(min(drawn, limit), limit))
        estimate.learn_from_retraction(ended(0, limit))
        assert all(0 <= share <= ONE for share in estimate.shares)
        fresh = ended(0, limit)
        assert 1 <= estimate.remaining(fresh) <= limit
        assert estimate.remaining(ended(limit, limit)) == 0


def test_it_learns_each_size_of_max_tokens_by_itself_up_and_down():
    estimate = OutputEstimate(0.5)
    assert (estimate.remaining(ended(0, 100)), estimate.remaining(ended(0, 1000))) == (50, 500)
    for _ in range(300):
        estimate.learn(ended(100, 100))
        estimate.learn(ended(30, 1000))
    assert estimate.remaining(ended(0, 100)) >= 99
    assert 29 <= estimate.remaining(ended(0, 1000)) <= 31
    assert estimate.remaining(ended(500, 1000)) <= 16
    for _ in range(300):
        estimate.learn(ended(1000, 1000))
    assert estimate.remaining(ended(0, 1000)) >= 990


def test_requests_that_drew_nothing_teach_nothing_and_retractions_teach_fast():
    estimate = OutputEstimate(0.0)
    estimate.learn(ended(0, 100))
    assert estimate.remaining(ended(0, 100)) == 1
    for _ in range(10):
        estimate.learn_from_retraction(ended(5, 100))
    assert estimate.remaining(ended(0, 100)) > 70


def test_a_first_guess_for_a_limit_that_nobody_set_is_moderate():
    estimate = OutputEstimate(0.3)
    assert estimate.remaining(ended(0, 128_000)) <= 0.3 * MAX_START_OUTPUT
    assert estimate.remaining(ended(0, 2000)) == 599


def test_the_whole_output_is_kept_in_mind_whatever_ended():
    estimate = OutputEstimate(1.0)
    for _ in range(100):
        estimate.learn(ended(1, 100_000))
    assert estimate.is_whole
    assert estimate.remaining(ended(0, 100_000)) == 100_000
