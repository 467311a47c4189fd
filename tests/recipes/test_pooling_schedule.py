"""The pooling of each step of a schedule."""

import pytest

from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK
from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.pooling import final_pooling, pooling_at

# By hand: cosine gives the shares 0, 0.1464, 0.5, 0.8536 and 1 of the way in five steps.
TABLE = [
    (PoolingSection(top_k=2, start=16.0, schedule="linear"), [16, 12, 9, 6, 2]),  # 12.5 and 5.5 to the even number
    (PoolingSection(top_k=16, start=2.0, schedule="linear"), [2, 6, 9, 12, 16]),
    (PoolingSection(top_k=1, start=16.0, schedule="cosine"), [16, 14, 8, 3, 1]),
    (PoolingSection(softmax=0.2, start=1.0, schedule="linear"), [1.0, 0.8, 0.6, 0.4, 0.2]),
    (PoolingSection(softmax=0.02, start=1.0, schedule="cosine"), [1.0, 0.856482, 0.51, 0.163518, 0.02]),
    (PoolingSection(log_sum_exp=0.5), [0.5] * 5),
]
KINDS = {"top_k": TopK, "softmax": Softmax, "log_sum_exp": LogSumExp}


@pytest.mark.parametrize(("section", "values"), TABLE)
def test_the_first_step_has_the_start_and_the_last_the_end(section, values):
    poolings = [pooling_at(section, step, 5) for step in range(5)]
    assert {type(pooling) for pooling in poolings} == {KINDS[section.name]}
    found = [next(iter(vars(pooling).values())) for pooling in poolings]
    assert found == (values if section.top_k else pytest.approx(values, abs=1e-6))
    # Exactly, as a recipe says it.
    assert poolings[-1] == final_pooling(section) == pooling_at(section, 7, 5) == pooling_at(section, 0, 1)
    assert values[-1] == getattr(section, section.name)


def test_without_a_section_it_is_the_maximum():
    assert pooling_at(None, 3, 5) == final_pooling(None) == Max()
