"""XTR scores as a differentiable operator: of each query token only the batch's k best document tokens count."""

from functools import partial
from typing import Literal, get_args

import torch
from torch import SymInt, Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import xtr as blocked
from pylate_fastmaxsim.ops import maxsim as _maxsim  # noqa: F401  registers the backward
from pylate_fastmaxsim.ops.operands import check_numbers, fake_scores, path, prepared, recording
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import Tokens

Normalizer = Literal["positive", "retrieved"]

# Divisor of a sum where nothing counts, as in PyLate. Where nothing was retrieved the sum is 0.
_SMALLEST_COUNT = 1e-3


def xtr_scores(
    queries: Tokens,
    documents: Tokens,
    k: int,
    candidates: Tensor | None = None,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
    normalizer: Normalizer = "positive",
) -> Tensor:
    """Score as XTR trains: of each query token only the k best document tokens of the whole batch count.

    Let ``t_s`` be the k-th largest similarity of query token s to any live token of any document. A document gives s
    its largest similarity to s if that is at least ``t_s``, and 0 otherwise. The score is the sum of what the live
    query tokens get, divided by a count of them that ``normalizer`` chooses. The count passes no gradient. The
    similarities are never held. Differentiable once in queries and documents.

    All tokens that equal the k-th largest similarity pass; ``torch.topk``, which PyLate and Sentence Transformers use,
    picks exactly k of them in no defined order. Of equal maxima in a document the first wins. NaN in a live token gives
    NaN in every score that uses it and, as in ``topk``, counts as larger than any number. Repeatable bit by bit.

    Parameters
    ----------
    queries
        Nq queries: a ``TokenBatch``, or padded token vectors ``[Nq, Lq, d]``. bfloat16, float16, float32 or float64.
    documents
        Nd documents, likewise, of the same d, dtype and device.
    k
        How many document tokens pass for each query token, at least 1. All pass where there are fewer than k.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, indices from 0 to Nd - 1 in any order, repeats allowed;
        ``None``: all. The tokens of all documents compete either way. The range is checked on a CPU only.
    queries_mask
        With padded queries: tokens that count, ``[Nq, Lq]``, bool or 0/1, any pattern. ``None``: all.
    documents_mask
        With padded documents: tokens that count, ``[Nd, Ld]``. ``None``: all.
    zero_floor
        Documents of which every query token gets at least 0, ``[Nd]``, bool. In PyLate those are the documents with a
        masked token. It matters only if all live tokens of a document pass and are negative. Not with
        ``normalizer="retrieved"``.
    normalizer
        Which query tokens the sum is divided by the number of. ``"positive"``, as in PyLate: those that get more than 0,
        or 0.001 if none does; a token that does not pass counts as 0 in the maximum of its document. ``"retrieved"``, as
        in Sentence Transformers: those for which a token of the document passes, even at a negative similarity; the
        score is 0 if there is none.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        k is less than 1, shapes, dtypes or devices do not fit together, ``normalizer`` is none of the two, or
        ``zero_floor`` is given with ``normalizer="retrieved"``. On a CPU also: a mask holds more than 0 and 1, a
        candidate is out of range, or sequences share rows where gradients are wanted.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Autocast, float32 precision and sums are as in :func:`pylate_fastmaxsim.maxsim`.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, xtr_scores
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, 3.0]]), torch.ones(1, 2)])
    >>> xtr_scores(queries, documents, k=1)
    tensor([[2.5000, 0.0000]])
    >>> xtr_scores(queries, documents, k=2)
    tensor([[2.5000, 1.0000]])
    >>> xtr_scores(-queries, documents, k=2, normalizer="retrieved")
    tensor([[-0.2500, -1.0000]])
    """
    k = require_count("xtr_scores", "k", k)
    if normalizer not in get_args(Normalizer):
        raise ValueError(f'xtr_scores: normalizer must be "positive" or "retrieved", got {normalizer!r}.')
    if normalizer == "retrieved" and zero_floor is not None:
        raise ValueError('xtr_scores: zero_floor goes with normalizer="positive" only.')
    operands = prepared("xtr_scores", queries, documents, candidates, queries_mask, documents_mask, zero_floor)
    scores, *_ = _scores_and_winners(operands, k, normalizer == "retrieved", recording("xtr_scores", operands))
    return scores


def _forward(
    operands: ScoringOperands, k: int | SymInt, count_retrieved: bool, want_winners: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores, what their sums were divided by, and winners."""
    module = path("xtr", blocked, operands.q_values)
    sums, counts, winners = module.forward(operands, k, count_retrieved, want_winners)
    counts = counts.clamp_(min=_SMALLEST_COUNT)
    return sums.div_(counts), counts, winners


def _forward_fake(operands, k, count_retrieved, want_winners):
    scores, winners = fake_scores(operands, want_winners)
    return scores, torch.empty_like(scores), winners


def _backward(
    grad_scores: Tensor, counts: Tensor, winners: Tensor, operands: ScoringOperands, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    # Given the winners, a score is a sum, as in MaxSim.
    gradients = torch.ops.pylate_fastmaxsim.maxsim_backward
    return gradients(grad_scores / counts, winners, *operands, need_q, need_d)


_scores_and_winners = differentiable(
    Operator("xtr_forward", _forward, _forward_fake, check=partial(check_numbers, "xtr_scores")),
    ("scores", "counts", "winners"),
    ("q_values", "d_values"),
    _backward,
    where="xtr_scores",
)
