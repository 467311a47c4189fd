"""The pooling of a recipe: its schedule, and plain PyTorch, which stands for stock PyLate in a comparison."""

from dataclasses import asdict

import pytest
import torch
from pylate.scores import ColBERTScores, colbert_kd_scores

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.recipes.config.kinds import PyLateFast
from pylate_fastmaxsim.recipes.config.schema import PoolingSection
from pylate_fastmaxsim.recipes.plugin import plugin_of
from pylate_fastmaxsim.recipes.pooling import PlainPooledScores, final_pooling, pooling_at, score_metric

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
    assert pooling_at(None, 3, 5) == final_pooling(None) == Max()


def embeddings() -> list[torch.Tensor]:
    """Of 3 queries and 2 documents for each, and their masks; one document has fewer live tokens than k."""
    torch.manual_seed(0)
    queries, documents = (torch.randn(*shape, 8, dtype=torch.float64) for shape in ((3, 4), (3, 2, 9)))
    masks = [torch.rand(each.shape[:-1]) < 0.7 for each in (queries, documents)]
    masks[1][0, 0] = torch.arange(9) < 2
    return [queries.requires_grad_(), documents.requires_grad_(), *masks]


@pytest.mark.parametrize("own_documents", [False, True])
@pytest.mark.parametrize("pooling", [Max(), TopK(3), TopK(20), Softmax(0.3), LogSumExp(0.3)])
def test_scores_and_gradients_are_those_of_the_operator(pooling, own_documents):
    results = []
    plain = PlainPooledScores(pooling, own_documents)
    for metric in (plain, PooledScores(pooling, own_documents=own_documents)):
        given = embeddings()
        scores = metric(*given)
        scores.sin().sum().backward()
        results.append((scores, given[0].grad, given[1].grad))
    torch.testing.assert_close(*results)


def test_the_maximum_is_pylates_own_in_its_dtype():
    queries, documents, _, _ = embeddings()
    for own_documents, stock in ((False, ColBERTScores()), (True, colbert_kd_scores)):
        with torch.autocast("cpu", torch.bfloat16):
            plain = PlainPooledScores(Max(), own_documents)(queries, documents)
            expected = stock(queries, documents)
        assert plain.dtype == expected.dtype and plain.equal(expected)


def test_the_metric_is_that_of_the_plugin_where_it_is_on():
    assert isinstance(score_metric(PoolingSection(top_k=4), own_documents=False), PlainPooledScores)
    with pylate_fastmaxsim.enabled():
        assert isinstance(score_metric(PoolingSection(top_k=4), own_documents=True), PooledScores)


def test_every_option_of_the_fast_section_reaches_the_flag_and_pooling_is_the_losses():
    section = PyLateFast(padding_free=False, compile=True, stock_masking=True)
    assert all(value != getattr(PyLateFast(), key) for key, value in asdict(section).items() if key != "enabled")
    with plugin_of(section):
        assert {"enabled": True, **asdict(current_options())} == asdict(section) | {"pooling": {}}
