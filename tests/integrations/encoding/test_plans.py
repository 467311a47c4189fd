"""How documents are shared out into groups of similar length and into mini-batches."""

from __future__ import annotations

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


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_groups_hold_every_document_once_with_the_least_padding(lengths, count):
    count = min(count, len(lengths))
    groups = group_by_length(lengths, count)
    assert len(groups) == count and all(groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))

    def tokens(parts):
        return sum(len(part) * max(part) for part in parts if part)

    ours = tokens([[lengths[index] for index in group] for group in groups])
    ordered = sorted(lengths)
    for cut in range(len(ordered)):
        if count >= 2:
            assert ours <= tokens([ordered[:cut], ordered[cut:]])
        for second in range(cut, len(ordered)):
            if count >= 3:
                assert ours <= tokens([ordered[:cut], ordered[cut:second], ordered[second:]])


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(40, 200), st.integers(0, 3))
def test_mini_batches_keep_to_their_budget(lengths, budget, more):
    for fill, tokens in (
        (fill_in_order, lambda part: sum(lengths[index] for index in part)),
        (fill_by_length, lambda part: len(part) * max(lengths[index] for index in part)),
    ):
        parts = fill(lengths, budget)
        wanted = min(len(parts) + more, len(lengths))
        parts = split_until(parts, wanted)
        assert len(parts) == wanted and all(parts)
        assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
        assert all(tokens(part) <= budget for part in parts)
        if fill is fill_in_order:
            assert [index for part in parts for index in part] == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=100))
def test_a_gpu_has_as_many_groups_as_take_the_shortest_time(lengths):
    def time(count):
        groups = group_by_length(lengths, count)
        return max(count * TOKENS_PER_CALL, sum(len(group) * max(lengths[i] for i in group) for group in groups))

    most = number_of_groups(lengths, on_gpu=False)
    assert 1 <= most <= min(len(lengths), 8)
    count = number_of_groups(lengths, on_gpu=True)
    assert time(count) == min(time(other) for other in range(1, most + 1))
