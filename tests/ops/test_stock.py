"""XTR scores against those of PyLate at their edges; integrations/pylate/test_pylate_scores.py compares the rest."""

import torch
from pylate.scores import XTRScores

from pylate_fastmaxsim import xtr_scores


def unit(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=-1)


def test_all_tokens_pass_as_in_pylate_where_k_is_their_number():
    queries, documents = unit(3, 4, 2, seed=0), unit(3, 2, 2, 2, seed=1)
    stock = XTRScores(k=12)(queries, documents)
    assert (stock < 0).any(), "documents whose tokens are all negative must take part"
    for k in (12, 13, 1000):
        torch.testing.assert_close(xtr_scores(queries, documents.flatten(0, 1), k), stock)
    # NaN takes a place.
    documents[1, 0, 1] = torch.nan
    nan = xtr_scores(queries, documents.flatten(0, 1), 4)
    torch.testing.assert_close(nan, XTRScores(k=4)(queries, documents), equal_nan=True)
    documents[1, 0, 1] = 0
    # Where nothing is positive the sum is divided by PyLate's smallest count.
    nothing = -documents[:1].abs(), queries[:1].abs()
    torch.testing.assert_close(xtr_scores(nothing[1], nothing[0][0], 4), XTRScores(k=4)(nothing[1], nothing[0]))
