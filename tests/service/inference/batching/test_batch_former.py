import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, TypeVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batching.batch_former import Batch, BatchFormer
from service.inference.batching.request_queue import QueuedRequest
from service.inference.call_options import Priority
from tests.eventually import HANG_S

Item = TypeVar("Item")
NONE: Batch[int] = Batch()
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def former_of(
    *lengths: int,
    streams: int = 1,
    max_cost: float = 100,
    min_split_tokens: int = 100,
    fixed_cost: int = 10,
    pair_cost: float = 0.0,
) -> BatchFormer[Any]:
    """Return a former with one queued request per length."""
    former: BatchFormer[Any] = BatchFormer(
        streams=streams,
        max_cost=max_cost,
        min_split_tokens=min_split_tokens,
        fixed_cost=fixed_cost,
        long_row=400,
        attention_cost=lambda length: pair_cost * length**2,
    )
    for length in lengths:
        add(former, length)
    return former


def add(
    former: BatchFormer[int], *lengths: int, priority: Priority = "interactive"
) -> QueuedRequest[int]:
    """Queue items that are named by their lengths."""
    return former.add(lengths, lengths, priority)


def next_batch(former: BatchFormer[Item], ended: Batch[Item]) -> Batch[Item]:
    """Return the next batch of the stream that has run the ended batch."""
    former.release(ended, 0.0)
    return former.form(1.0)


def batches_of(former: BatchFormer[int]) -> list[list[int]]:
    """Return all batches, the items of each sorted."""
    return [sorted(batch.items) for batch in formed(former)]


def formed(former: BatchFormer[int]) -> Iterator[Batch[int]]:
    batch = NONE
    while (batch := next_batch(former, batch)).items:
        yield batch


def test_empty_queue_forms_an_empty_batch() -> None:
    former = former_of()
    assert not former.form(1.0).items
    add(former, 5)
    assert former.form(1.0) == Batch([5], 5, 15.0, is_interactive=True)
    assert not former.form(1.0).items


def test_queued_requests_form_one_batch() -> None:
    assert batches_of(former_of(10, 11, 12)) == [[10, 11, 12]]


def test_batch_groups_lengths_similar_to_the_oldest_item() -> None:
    assert batches_of(former_of(40, 5, 41, 6, 42, 7)) == [[40, 41], [5, 6, 7, 42]]


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [((30, 29, 60), [[29, 30], [60]]), ((40, 10, 55), [[40, 55], [10]])],
)
def test_nearest_length_joins_the_batch_first(
    lengths: Sequence[int], batches: list[list[int]]
) -> None:
    assert batches_of(former_of(*lengths)) == batches


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.001, 0.02]),
)
def test_batch_cost_stays_within_max_cost(lengths: list[int], pair_cost: float) -> None:
    for batch in formed(former_of(*lengths, pair_cost=pair_cost)):
        cost = batch.tokens + pair_cost * len(batch.items) * max(batch.items) ** 2
        assert batch.tokens == sum(batch.items)
        assert len(batch.items) == 1 or cost <= 100


def test_item_above_max_cost_runs_in_a_batch_of_its_own() -> None:
    assert batches_of(former_of(99, 150, 99)) == [[99], [150], [99]]


def test_padded_attention_counts_towards_the_cost() -> None:
    former = former_of(*[10] * 8, pair_cost=0.2)
    # 2 rows cost 20 + 2 * 100 * 0.2 = 60; a third makes it 90, a fourth 120.
    assert [len(batch) for batch in batches_of(former)] == [3, 3, 2]


@pytest.mark.parametrize(
    ("fixed_cost", "batches"), [(1, [[30], [4], [29]]), (8, [[29, 30], [4]]), (18, [[4, 29, 30]])]
)
def test_item_never_joins_a_batch_where_padding_costs_more_than_a_separate_run(
    fixed_cost: int, batches: list[list[int]]
) -> None:
    # Beside 30, attention makes 29 cost 18.0 instead of 16.8, and 4 instead of 0.3.
    former = former_of(30, 4, 29, max_cost=1000, fixed_cost=fixed_cost, pair_cost=0.02)
    assert batches_of(former) == batches


def test_items_of_equal_length_run_in_order_of_arrival() -> None:
    former: BatchFormer[str] = former_of()
    for who in "ab":
        former.add([f"{who}{i}" for i in range(4)], [30] * 4)
    batch: Batch[str] = Batch()
    # Three fit. The second batch is b's turn: its oldest, then whatever has waited longest.
    for expected in (["a0", "a1", "a2"], ["b0", "a3", "b1"], ["b2", "b3"]):
        batch = next_batch(former, batch)
        assert batch.items == expected


def test_small_request_waits_for_one_batch_of_a_huge_one_at_most() -> None:
    former = former_of()
    add(former, *[50] * 500)
    add(former, 2)
    assert 2 in batches_of(former)[1]


def test_item_of_unusual_length_does_not_starve() -> None:
    former = former_of(*[5] * 20, 95)
    batch, before = NONE, 0
    while 95 not in (batch := next_batch(former, batch)).items:
        before += 1
        for _ in range(40):
            add(former, 5)
    # At most one batch per request that was queued before it.
    assert before <= 20


def test_batch_leaves_other_streams_their_share_of_the_tokens() -> None:
    former = former_of(*[6] * 8, streams=2, min_split_tokens=1)
    first, second = former.form(1.0), former.form(1.0)
    assert [len(first.items), len(second.items)] == [4, 4]
    add(former, *[6] * 8)
    # 48 queued and 24 running tokens: a share of 36.
    assert len(next_batch(former, first).items) == 6


def test_queued_bulk_items_do_not_keep_interactive_ones_in_one_batch() -> None:
    former = former_of(*[6] * 8, streams=2, min_split_tokens=1)
    add(former, *[6] * 80, priority="bulk")
    assert [len(former.form(1.0).items) for _ in range(2)] == [4, 4]


def test_queue_below_min_split_tokens_forms_one_batch() -> None:
    former = former_of(*[6] * 8, streams=2, min_split_tokens=33)
    assert [len(batch) for batch in batches_of(former)] == [6, 2]


def test_removed_items_are_in_no_batch() -> None:
    former = former_of(50)
    leaving = add(former, 77, 78)
    add(former, 51)
    former.remove(leaving)
    assert former.tokens == 101
    assert batches_of(former) == [[50], [51]]
    former.remove(leaving)
    assert former.tokens == 0


def test_removed_items_are_released_while_others_wait() -> None:
    former = former_of()
    former.remove(add(former, 400))
    for _ in range(20):
        add(former, 90)
    former.form(1.0)
    assert former.tokens == 19 * 90
    assert 400 not in former._queues["interactive"].by_length


@pytest.mark.parametrize("leaves", [False, True])
def test_items_that_have_left_the_queue_are_released_though_nothing_else_is_queued(
    leaves: bool,
) -> None:
    former: BatchFormer[set[int]] = former_of()
    request = former.add([item := {1}], [90])
    gone = weakref.ref(item)
    del item
    if leaves:
        former.remove(request)
    else:
        assert former.form(1.0).items == [{1}]
    del request
    assert gone() is None


def test_adding_and_removing_a_request_costs_no_search_of_the_queue() -> None:
    former = former_of(1)
    # A search of the queue per removal would take minutes.
    for request in [add(former, *[1] * 2000) for _ in range(100)]:
        former.remove(request)
    assert former.tokens == 1


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 150), min_size=1, max_size=9),
            st.sampled_from(PRIORITIES),
        )
        | st.none(),
        max_size=30,
    )
)
def test_every_item_is_in_exactly_one_batch(
    requests: list[tuple[list[int], Priority] | None],
) -> None:
    former, batch = former_of(), NONE
    out: list[int] = []
    for request in requests:
        if request is not None:
            add(former, *request[0], priority=request[1])
        else:
            batch = next_batch(former, batch)
            out += batch.items
    out += [item for rest in batches_of(former) for item in rest]
    assert Counter(out) == Counter(item for request in requests if request for item in request[0])
    assert former.tokens == 0


@pytest.mark.parametrize("_attempt", range(25))  # without a lock, two of five go well
def test_concurrent_add_and_form_neither_lose_nor_repeat_items(_attempt: int) -> None:
    former = former_of(streams=4, min_split_tokens=1)
    kept = [1000 * adder + i for adder in range(2) for i in range(0, 1000, 2)]
    out: list[int] = []
    all_added = threading.Event()

    def put(adder: int) -> None:
        for i in range(0, 1000, 2):
            name = 1000 * adder + i
            former.add([name], [1 + i % 60])
            former.remove(former.add([-1], [1 + i % 60]))

    def take() -> None:
        batch, was_last = NONE, False
        while batch.items or not was_last:
            was_last = all_added.is_set()
            batch = next_batch(former, batch)
            out.extend(batch.items)

    takers = [threading.Thread(target=take) for _ in range(4)]
    adders = [threading.Thread(target=put, args=[adder]) for adder in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in takers + adders:
            thread.start()
        for thread in adders:
            thread.join(HANG_S)
        all_added.set()
        for thread in takers:
            thread.join(HANG_S)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(item for item in out if item >= 0) == kept
    assert former.tokens == 0


def test_tokens_ahead_counts_what_runs_before_a_new_request() -> None:
    former = former_of(10, 20)
    add(former, *[5] * 100)
    assert former.tokens_ahead(1) == 3
    assert former.tokens_ahead(15) == 10 + 15 + 15
    assert former.tokens_ahead(10_000) == 10 + 20 + 500
    assert former_of().tokens_ahead(10) == 0


def test_tokens_ahead_of_many_requests_is_estimated_from_the_first() -> None:
    former = former_of(*[10] * 5000)
    assert former.tokens_ahead(7) == 5000 * 7


def test_tokens_ahead_ignores_finished_and_removed_items() -> None:
    former = former_of()
    leaving, staying = add(former, 30, 30), add(former, 40, 60)
    former.remove(leaving)
    assert former.form(1.0).tokens == 100
    assert former.tokens_ahead(1000) == 0
    assert staying.tokens == leaving.tokens == 0


def test_oldest_items_has_one_item_of_each_queued_request() -> None:
    former = former_of(min_split_tokens=1)
    add(former, 60, 61)
    add(former, 70)
    left = add(former, 80)
    former.remove(left)
    assert former.oldest_items() == [60, 70]
    assert former.form(1.0).items == [60]
    assert sorted(former.oldest_items()) == [61, 70]


def test_long_items_take_every_second_turn_while_shorter_ones_wait() -> None:
    former = former_of(900, 901, 902, 903, 5, 6)
    assert [item for batch in formed(former) for item in batch.items] == [
        *(900, 5, 6),
        *(901, 902, 903),
    ]
    former = former_of(900, 901, 60, 61, 62)
    assert batches_of(former) == [[900], [60], [901], [61], [62]]


def test_long_items_run_one_at_a_time_and_leave_other_streams_to_shorter_ones() -> None:
    former = former_of(900, 901, 902, 5, streams=2)
    first = former.form(1.0)
    assert first.items == [900]
    second = former.form(1.0)
    assert second.items == [5]
    assert not next_batch(former, second).items
    add(former, 7)
    second = former.form(1.0)
    assert second.items == [7]
    first = next_batch(former, first)
    assert first.items == [901]
    assert not next_batch(former, second).items
    assert next_batch(former, first).items == [902]


def test_long_items_run_however_many_shorter_ones_arrive() -> None:
    former = former_of(900, 901)
    batch, long_items = NONE, []
    for _ in range(4):
        add(former, 60)
        batch = next_batch(former, batch)
        long_items += [item for item in batch.items if item >= 900]
    assert long_items == [900, 901]


def test_short_items_behind_a_long_one_of_their_request_do_not_wait_for_it() -> None:
    former = former_of(900, streams=2)
    assert former.form(1.0).is_long
    add(former, 901, 5, 902, 6)
    assert sorted(former.form(1.0).items) == [5, 6]


def test_interactive_items_overtake_bulk_items_and_share_no_batch_with_them() -> None:
    former = former_of()
    add(former, *[8] * 20, priority="bulk")
    assert former.form(1.0).items == [8] * 12
    add(former, 7)
    add(former, 9)
    assert sorted(former.form(1.0).items) == [7, 9]
    assert former.form(1.0).items == [8] * 8


def test_bulk_requests_have_a_tenth_of_the_tokens_while_interactive_ones_are_queued() -> None:
    former = former_of(*[90] * 400)
    add(former, *[80] * 20, priority="bulk")
    add(former, *[81] * 20, priority="bulk")
    batches = [item for batch in batches_of(former) for item in batch]
    beside = batches[: len(batches) - batches[::-1].index(90)]
    ran = [item for item in beside if item < 90]
    # One batch of a bulk item may still be due.
    assert sum(ran) / sum(beside) == pytest.approx(0.1, abs=0.02)
    assert abs(ran.count(80) - ran.count(81)) <= 1
    # The first is due after 9 x 128 interactive tokens.
    assert batches.index(80) == 13


def test_a_long_bulk_item_is_paid_with_the_turns_after_it() -> None:
    former = former_of(*[90] * 100)
    add(former, 400, 400, priority="bulk")
    items = [item for batch in batches_of(former) for item in batch]
    first, second = (index for index, item in enumerate(items) if item == 400)
    assert first == 13
    assert (second - first) * 90 == pytest.approx(9 * 400, rel=0.1)


def test_bulk_batches_are_small_beside_interactive_items_and_double_without() -> None:
    former = former_of(5, max_cost=1000, min_split_tokens=1000, streams=2)
    interactive = former.form(1.0)
    former.release(interactive, 0.0)
    add(former, *[20] * 400, priority="bulk")
    # Nothing interactive is queued or running: 1,000 tokens.
    assert len(former.form(1.0).items) == 50
    add(former, 5)
    interactive = former.form(1.0)
    assert (interactive.items, interactive.is_interactive) == ([5], True)
    # While it runs, 128 tokens; then 256, 512 and 1,000.
    assert [len(former.form(1.0).items) for _ in range(2)] == [6, 6]
    former.release(interactive, 0.0)
    assert [len(former.form(1.0).items) for _ in range(4)] == [12, 25, 50, 50]
    add(former, 300, priority="bulk")
    add(former, 5)
    rest = batches_of(former)
    assert [len(batch) for batch in rest[:2]] == [1, 6]
    assert [300] in rest


def test_interactive_tokens_count_only_while_bulk_items_are_queued() -> None:
    former = former_of(*[90] * 40)
    batch = NONE
    for _ in range(20):
        batch = next_batch(former, batch)
    add(former, 80, priority="bulk")
    assert batches_of(former)[:14] == [*[[90]] * 13, [80]]


def test_a_stream_that_has_run_interactive_items_waits_a_moment_before_bulk_ones() -> None:
    former = former_of(5)
    former.release(former.form(7.0), 7.0)
    add(former, 8, priority="bulk")
    assert not former.form(7.005).items
    assert former.retry_s(7.005) == pytest.approx(0.005)
    add(former, 6)
    assert former.form(7.006).items == [6]
    assert former.retry_s(7.006) == inf  # no stream is idle
    former.release(Batch([6], 6, 16.0, is_interactive=True), 7.02)
    assert not former.form(7.029).items
    assert former.form(7.03).items == [8]
    assert former.retry_s(7.03) == inf


def test_waits_for_interactive_items_end_after_some_time() -> None:
    former, now = former_of(), 7.0
    add(former, *[100] * 40, priority="bulk")
    ran: list[int] = []
    # An item every 9 ms, which takes no time: the stream is idle, but never for 10 ms.
    for _ in range(200):
        add(former, 5)
        former.release(former.form(now), now)
        now += 0.004
        if (batch := former.form(now)).items:
            ran += batch.items
            former.release(batch, now)
        now += 0.005
    # 1.8 s, of which the interactive items' tenth takes 111 tokens: that alone would run one.
    assert 5 <= len(ran) < 20


def test_bulk_items_in_idle_streams_are_not_paid_later() -> None:
    former = former_of(streams=2)
    add(former, *[100] * 50, 80, priority="bulk")
    for _ in range(50):
        add(former, 10)
        interactive = former.form(7.0)
        former.release(former.form(7.0), 7.0)  # a bulk batch beside the interactive item
        former.release(interactive, 0.0)
    for _ in range(30):
        add(former, 90)
    # One batch is paid, and then 9 x 128 tokens run.
    assert [80] in batches_of(former)[:25]


def test_nothing_is_retried_when_something_else_keeps_bulk_items_from_running() -> None:
    former = former_of(5)
    former.release(former.form(7.0), 7.0)
    add(former, 8, priority="bulk")
    assert former.retry_s(7.004) == pytest.approx(0.006)
    assert former.retry_s(8.0) == inf
    # A tenth is due, but only one long item runs at a time.
    former = former_of(*[90] * 13, streams=2)
    add(former, 450, 451, priority="bulk")
    for _ in range(13):
        former.release(former.form(7.0), 7.0)
    assert former.form(7.0).items == [450]
    assert not former.form(7.0).items
    assert former.retry_s(7.0) == inf


def test_other_streams_run_bulk_items_meanwhile() -> None:
    former = former_of(5, streams=3)
    interactive = former.form(7.0)
    add(former, *[200] * 3, priority="bulk")
    first = former.form(7.0)
    former.release(interactive, 7.0)
    assert [len(former.form(7.0).items) for _ in range(2)] == [1, 0]
    former.release(first, 7.001)
    assert former.form(7.001).items == [200]


def test_bulk_items_run_while_no_interactive_item_may_run() -> None:
    former = former_of(900, 901, streams=2)
    add(former, 5, priority="bulk")
    assert [list(former.form(1.0).items) for _ in range(3)] == [[900], [5], []]


def test_removed_bulk_items_are_released_while_interactive_ones_run() -> None:
    former = former_of(90)
    former.remove(add(former, 400, priority="bulk"))
    former.form(1.0)
    assert 400 not in former._queues["bulk"].by_length


def test_tokens_ahead_respect_the_priority() -> None:
    former = former_of(30, 60)
    add(former, *[50] * 100, priority="bulk")
    assert former.tokens_ahead(40, "bulk") == 30 + 60 + 40
    # 30 and 40 tokens in turns, then 1 bulk turn per 9 interactive turns.
    assert former.tokens_ahead(40, "interactive") == 30 + 40 + (30 + 40 + 40) // 9
    former = former_of()
    add(former, 2, priority="bulk")
    assert former.tokens_ahead(90, "interactive") == 2
    assert (former.tokens_of("bulk"), former.tokens_of("interactive"), former.tokens) == (2, 0, 2)


def test_oldest_items_include_bulk_items() -> None:
    former = former_of(60)
    add(former, 50, 51, priority="bulk")
    assert former.oldest_items() == [60, 50]
