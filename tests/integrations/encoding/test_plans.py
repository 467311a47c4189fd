"""How documents are shared out into groups of similar length."""

from itertools import combinations_with_replacement

from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim.integrations.encoding.plans import group_by_length


def tokens_of(groups, lengths):
    return sum(len(group) * max(lengths[index] for index in group) for group in groups if group)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 3))
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
