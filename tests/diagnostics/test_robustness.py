import math

import pytest
import torch

from pylate_fastmaxsim import Max, TokenBatch
from pylate_fastmaxsim.diagnostics import robustness
from pylate_fastmaxsim.diagnostics.robustness import (
    grades_of,
    length_sweep,
    lengthened,
    retrieval_metrics,
    values_by_query,
)  # fmt: skip


def test_metrics_by_hand():
    scores = torch.tensor([[1.0, 3.0, 2.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 4.0, 3.0, 2.0]])
    grades = torch.tensor([[2.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, torch.nan, 1.0, -1.0]])
    found = retrieval_metrics(scores, grades)
    first = (1 / math.log2(3) + 2 / math.log2(4)) / (2 + 1 / math.log2(3))
    # The second query's gold document ties with an earlier one; the third's best one is no result.
    torch.testing.assert_close(found["ndcg@10"], torch.tensor([first, 1 / math.log2(3), 1.0]))
    assert found["recall@1"].tolist() == [0, 0, 1] and found["recall@5"].tolist() == [1, 1, 1]
    assert retrieval_metrics(-scores[:1], grades[:1])["recall@1"].tolist() == [0]
    assert retrieval_metrics(torch.tensor([[5.0, 3.0, 2.0, 0.0]]), grades[:1])["recall@1"].tolist() == [0.5]
    falling = torch.arange(12.0, 0, -1)[None]
    assert [retrieval_metrics(falling, grades_of([[place]], 12))["ndcg@10"] > 0 for place in (9, 10)] == [True, False]


def test_longer_documents_begin_with_the_shorter_ones_and_never_hold_themselves():
    rows = [torch.full((length, 1), float(place)) for place, length in enumerate((2, 1, 3, 0))]
    documents = TokenBatch.from_list(rows)
    longer = dict(lengthened(documents, documents, times=(1, 2, 5), own=[0, 1, 2, 3]))
    assert longer[5].lengths.tolist() == [10, 5, 15, 0]
    for document in range(3):
        values = {n: each.values[each.starts[document] :][: each.lengths[document]] for n, each in longer.items()}
        assert torch.equal(values[1], rows[document])
        assert torch.equal(values[5][: len(values[2])], values[2])
        assert not (values[5][len(rows[document]) :] == document).any()
    again = dict(lengthened(documents, documents, times=(5,), own=[0, 1, 2, 3]))
    assert torch.equal(again[5].values, longer[5].values)


def test_values_of_each_query_are_those_of_its_best_gold_document():
    queries = TokenBatch.from_list([torch.eye(4)[:2], torch.eye(4)[2:3]])
    documents = TokenBatch.from_list([torch.eye(4), torch.eye(4)[:2], torch.eye(4)[2:]])
    grades = torch.tensor([[1.0, 2.0, 0.0], [torch.nan, 0.0, 1.0]])
    found = values_by_query(queries, documents, grades, Max())
    # Two winners of two tokens, and one of two; the gold document of grade 1 would have 0.5.
    assert found["gini"] == pytest.approx([0, 0.5]) and found["recall@1"] == [0.5, 1] and found["recall@5"] == [1, 1]
    with pytest.raises(ValueError, match="values_by_query: there must be Nd = 2 documents"):
        values_by_query(queries, documents, torch.eye(2), Max())


def test_tokens_that_are_left_out_are_not_counted():
    documents = TokenBatch.from_padded(torch.ones(1, 3, 2), torch.tensor([[1, 0, 1]]))
    [row] = length_sweep(documents, lengthened(documents, documents, (3,)), grades_of([[0]], 1), [Max()])
    assert row["tokens"] == 6


def test_what_does_not_fit_together_is_refused():
    batch = TokenBatch.from_list([torch.ones(2, 3)] * 2)
    for grades, said in (
        (torch.eye(3), "grades must be [Nq, Nd] with Nq = 2"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "query 1 has none"),
        (torch.ones(2, 3), "there must be Nd = 3 documents, as in grades, got 2"),
    ):
        with pytest.raises(ValueError) as error:
            length_sweep(batch, [(1, batch)], grades, [Max()])
        assert said in str(error.value)
    with pytest.raises(ValueError, match="embeddings of documents must be finite"):
        length_sweep(batch, [(1, batch.with_values(batch.values * torch.nan))], torch.eye(2), [Max()])
    with pytest.raises(TypeError, match="length_sweep: pooling must be Max"):
        length_sweep(batch, [(1, batch)], torch.eye(2), ["max"])
    for lengths, own in (([0, 0], None), ([2], [0])):
        with pytest.raises(ValueError, match="another document to append"):
            robustness.draw_fillers([2], lengths, times=2, own=own)
    assert robustness.draw_fillers([2], [], times=1) == [[]]
