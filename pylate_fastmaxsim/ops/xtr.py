"""XTR scores as a differentiable operator: only the k best document tokens of the batch count for a query token."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._dtypes import float32_precision, sum_dtype
from pylate_fastmaxsim._winners import winner_layout
from pylate_fastmaxsim.cpu import xtr as blocked
from pylate_fastmaxsim.ops import grad_filter as grad_filters
from pylate_fastmaxsim.ops import maxsim as maxsim_ops
from pylate_fastmaxsim.ops.dispatch import runs_kernels
from pylate_fastmaxsim.ops.grad_filter import GradFilter
from pylate_fastmaxsim.tokens import TokenBatch

Normalizer = Literal["positive", "retrieved"]

# What a sum is divided by where nothing counts, as in PyLate. Where nothing was retrieved the sum is 0.
_SMALLEST_COUNT = 1e-3


def xtr_scores(
    queries: TokenBatch | Tensor,
    documents: TokenBatch | Tensor,
    k: int,
    candidates: Tensor | None = None,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
    normalizer: Normalizer = "positive",
    grad_filter: GradFilter = None,
) -> Tensor:
    """Score as XTR trains: of each query token only the k best document tokens of the whole batch count.

    Let ``t_s`` be the k-th largest similarity of query token s to any live token of any document. A document gives s
    its largest similarity to s if that is at least ``t_s``, and 0 otherwise. The score is the sum of what the live
    query tokens get, divided by a count of them that ``normalizer`` chooses. The count passes no gradient. The
    similarities are never held. Differentiable once in queries and documents.

    All tokens that equal the k-th largest similarity pass; ``torch.topk``, which PyLate and Sentence Transformers use,
    picks exactly k of them in an order that is not defined. Of equal maxima in a document the first wins. NaN in a live token gives NaN in
    every score that uses it and, as in ``topk``, counts as larger than any number. Repeatable bit by bit.

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
        masked token. It matters only where all live tokens of a document pass and are negative. Not with
        ``normalizer="retrieved"``.
    normalizer
        How many query tokens the sum is divided by. ``"positive"``, as in PyLate: those that get more than 0, or 0.001
        if none does; a token that does not pass counts as 0 in the maximum of its document. ``"retrieved"``, as in
        Sentence Transformers: those of which a token of the document passes; what they get may be negative. The score
        is 0 if none does.
    grad_filter
        ``"auto"``: the backward skips pairs of a query and a document whose gradients are too small to matter, of each
        query at most 2**-12 of the sum of its absolute gradients. ``None``: it skips only those of gradient 0.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        k is less than 1, shapes, dtypes or devices do not fit together, ``normalizer`` or ``grad_filter`` is none of the
        above, or ``zero_floor`` is given with ``normalizer="retrieved"``. On a CPU also: a mask holds more than 0 and 1, a candidate is out of range, or sequences share rows
        where gradients are wanted.
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
    if isinstance(k, int):
        k = min(k, sys.maxsize)  # more tokens there cannot be
    _check_normalizer(normalizer, zero_floor)
    grad_filters.check(grad_filter, "xtr_scores")
    queries, documents, q_values, d_values = maxsim_ops.prepared(
        "xtr_scores", queries, documents, candidates, queries_mask, documents_mask, zero_floor
    )
    differentiate, directly = maxsim_ops.recording("xtr_scores", queries, documents, q_values, d_values)
    forward = _Eager.apply if directly else torch.ops.pylate_fastmaxsim.xtr_forward
    scores, *_ = forward(
        q_values,
        queries.starts,
        queries.lengths,
        queries.keep,
        d_values,
        documents.starts,
        documents.lengths,
        documents.keep,
        candidates,
        zero_floor,
        k,
        normalizer == "retrieved",
        queries.max_length,
        documents.max_length,
        differentiate,
    )
    return grad_filters.filtered(scores) if differentiate and grad_filter else scores


def _check_normalizer(normalizer: Normalizer, zero_floor: Tensor | None) -> None:
    if normalizer not in get_args(Normalizer):
        raise ValueError(f'xtr_scores: normalizer must be "positive" or "retrieved", got {normalizer!r}.')
    if normalizer == "retrieved" and zero_floor is not None:
        raise ValueError('xtr_scores: zero_floor goes with normalizer="positive" only.')


def _path(values: Tensor) -> ModuleType:
    """The module that scores such values."""
    return _kernels() if runs_kernels(values) else blocked


@functools.cache
def _kernels() -> ModuleType:
    from pylate_fastmaxsim.kernels.xtr import launch

    return launch


torch.library.define(
    "pylate_fastmaxsim::xtr_forward",
    "(Tensor q_values, Tensor q_starts, Tensor q_lengths, Tensor? q_keep, "
    "Tensor d_values, Tensor d_starts, Tensor d_lengths, Tensor? d_keep, "
    "Tensor? candidates, Tensor? zero_floor, SymInt k, bool count_retrieved, "
    "SymInt max_q_length, SymInt max_d_length, bool want_winners) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("pylate_fastmaxsim::xtr_forward", "CompositeExplicitAutograd")
def _forward(q_values, *arguments):
    """Scores, what their sums were divided by, and winners."""
    *tensors, _, _, max_q_length, max_d_length, want_winners = arguments
    maxsim_ops.require_numbers("xtr_scores", q_values, *tensors, max_q_length, max_d_length, False, False, want_winners)
    sums, counts, winners = _path(q_values).forward(q_values, *arguments, float32_precision(q_values.dtype))
    counts = counts.clamp_(min=_SMALLEST_COUNT)
    return sums.div_(counts), counts, winners


@torch.library.register_fake("pylate_fastmaxsim::xtr_forward")
def _forward_fake(
    q_values, q_starts, q_lengths, q_keep, d_values, d_starts, d_lengths, d_keep,
    candidates, zero_floor, k, count_retrieved, max_q_length, max_d_length, want_winners,
):  # fmt: skip
    columns = d_starts.shape[0] if candidates is None else candidates.shape[1]
    scores = q_values.new_empty((q_starts.shape[0], columns), dtype=sum_dtype(q_values.dtype))
    shape, dtype = winner_layout(columns, q_values.shape[0], max_d_length, want_winners)
    return scores, torch.empty_like(scores), q_values.new_empty(shape, dtype=dtype)


def _save_for_backward(ctx, inputs, output):
    *tensors, _, _, max_q_length, max_d_length, ctx.has_winners = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    # Nothing is known of gaps here: gradients are filled with zeros first.
    ctx.sizes = max_q_length, max_d_length, False, False
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_scores, *_):
    gradients = [None] * 15
    if grad_scores is not None:
        maxsim_ops.require_winners("xtr_scores", ctx.has_winners)
        need_q, need_d = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        counts, *saved = ctx.saved_tensors
        # From the winners on a score is a sum, as that of MaxSim.
        grad_q, grad_d = torch.ops.pylate_fastmaxsim.maxsim_backward(
            grad_scores / counts, *saved, *ctx.sizes, need_q, need_d
        )
        gradients[0] = grad_q if need_q else None
        gradients[4] = grad_d if need_d else None
    return tuple(gradients)


class _Eager(torch.autograd.Function):
    """What `register_autograd` does below, in less host time, as for MaxSim."""

    @staticmethod
    def forward(ctx, *arguments):
        output = torch.ops.pylate_fastmaxsim.xtr_forward(*arguments)
        ctx.mark_non_differentiable(*output[1:])
        _save_for_backward(ctx, arguments, output)
        return output

    backward = staticmethod(_differentiate)


torch.library.register_autograd("pylate_fastmaxsim::xtr_forward", _differentiate, setup_context=_save_for_backward)
