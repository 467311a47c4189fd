"""How documents are shared out into groups of similar length and into mini-batches."""

from itertools import combinations_with_replacement

from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim.integrations.encoding.plans import (
    TOKENS_PER_CALL,
    fill_by_length,
    fill_in_order,
    group_by_length,
    number_of_groups,
    split_until,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def tokens_of(groups, lengths):
    return sum(len(group) * max(lengths[index] for index in group) for group in groups if group)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 3))
def test_groups_hold_every_document_once_with_the_least_padding(lengths, count):
    count = min(count, len(lengths))
    groups = group_by_length(lengths, count)
    assert len(groups) == count and all(groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for cuts in combinations_with_replacement(range(len(order)), count - 1):
        borders = [0, *cuts, len(order)]
        others = [order[begin:end] for begin, end in zip(borders, borders[1:], strict=False)]
        assert tokens_of(groups, lengths) <= tokens_of(others, lengths)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(40, 200), st.integers(0, 3))
def test_mini_batches_keep_to_their_budget(lengths, budget, more):
    for fill, tokens in (
        (fill_in_order, lambda part: sum(lengths[index] for index in part)),
        (fill_by_length, lambda part: tokens_of([part], lengths)),
    ):
        parts = fill(lengths, budget)
        wanted = min(len(parts) + more, len(lengths))
        parts = split_until(parts, wanted)
        assert len(parts) == wanted and all(parts) and all(tokens(part) <= budget for part in parts)
        order = [index for part in parts for index in part]
        assert (order if fill is fill_in_order else sorted(order)) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=100))
def test_a_gpu_has_as_many_groups_as_take_the_shortest_time(lengths):
    def time(count):
        return max(count * TOKENS_PER_CALL, tokens_of(group_by_length(lengths, count), lengths))

    most = number_of_groups(lengths, on_gpu=False)
    assert 1 <= most <= min(len(lengths), 8)
    assert time(number_of_groups(lengths, on_gpu=True)) == min(map(time, range(1, most + 1)))
