"""MaxSim as a differentiable operator, registered with torch.library."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import NUM_FIELDS, SCHEMA, ScoringOperands, gradients_of
from pylate_fastmaxsim._tracing import is_plain, is_plain_backward
from pylate_fastmaxsim._winners import winner_layout
from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.ops.compressed import SavedAsInt8, SavedDocuments, compressed_scores
from pylate_fastmaxsim.ops.dispatch import runs_kernels
from pylate_fastmaxsim.ops.operands import check_numbers, check_winners, fake_scores, prepared, recording
from pylate_fastmaxsim.tokens import TokenBatch


def maxsim(
    queries: TokenBatch | Tensor,
    documents: TokenBatch | CompressedBatch | Tensor,
    candidates: Tensor | None = None,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
    save_documents: SavedDocuments = None,
) -> Tensor:
    """Score queries against documents: each live query token takes its best live document token; sum over query tokens.

    ``score[i, j] = sum over live s of (max over live t of <q_is, d_jt>)``, without holding the similarities: the
    forward keeps one running maximum per query token and document, and the backward touches only the tokens that gave
    these maxima, the winners. Differentiable once in both arguments. The first of equal maxima wins. A document
    without a live token scores 0 and passes no gradient. NaN in a live token gives NaN in every score that uses it.
    Repeatable bit by bit.

    Parameters
    ----------
    queries
        Nq queries: a ``TokenBatch``, or padded token vectors ``[Nq, Lq, d]``. bfloat16, float16, float32 or float64.
    documents
        Nd documents, likewise, of the same d, dtype and device. Or a ``CompressedBatch`` of the same d and device, which is
        scored as it is stored, as :func:`pylate_fastmaxsim.reference.compressed_maxsim` defines it, and has no gradient.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, indices from 0 to Nd - 1 in any order, repeats allowed.
        ``None``: all. The range is checked on a CPU only; on a GPU the check would have to wait for the device.
    queries_mask
        With padded queries: tokens that count, ``[Nq, Lq]``, bool or 0/1, any pattern. ``None``: all.
    documents_mask
        With padded documents: tokens that count, ``[Nd, Ld]``. ``None``: all.
    zero_floor
        Documents whose maxima start at 0 instead of -inf, ``[Nd]``, bool. Set for documents with a masked token, it gives
        the scores of libraries that multiply masked tokens by 0 rather than leave them out.
    save_documents
        How documents are kept for the gradient of the queries. ``None``: as they are. ``"int8"``: rounded to int8 with a
        scale for each token, which takes half of bfloat16's memory where nothing else keeps the documents. Scores and the
        gradient of the documents stay as they are.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together, ``save_documents`` is neither ``"int8"`` nor ``None``, or it,
        ``documents_mask`` or ``zero_floor`` comes with a ``CompressedBatch``. On a CPU also: a mask holds more than 0
        and 1, a candidate is out of range, or sequences share rows where gradients are wanted.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Under autocast, float32, bfloat16 and float16 vectors are cast to the autocast dtype first, as in ``einsum``, but
    not to score documents in int8 or fp8. Otherwise float32 products follow ``torch.set_float32_matmul_precision`` and PyTorch's other switches for TF32. Sums
    are taken in float32. On a CPU, products of equal vectors may differ in the last bit. Then they are not equal maxima,
    and another of these tokens than the first may win.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, maxsim
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.ones(1, 2), torch.empty(0, 2)])
    >>> maxsim(queries, documents)
    tensor([[2., 2., 0.]])
    >>> maxsim(queries, documents, candidates=torch.tensor([[1, 1]]))
    tensor([[2., 2.]])
    """
    if save_documents not in (None, "int8"):
        raise ValueError(f'maxsim: save_documents must be "int8" or None, got {save_documents!r}.')
    if isinstance(documents, CompressedBatch):
        for name, value in (
            ("documents_mask", documents_mask), ("zero_floor", zero_floor), ("save_documents", save_documents),
        ):  # fmt: skip
            if value is not None:
                raise ValueError(f"maxsim: {name} goes with documents that are not compressed.")
        return compressed_scores(queries, documents, candidates, queries_mask)
    operands = prepared("maxsim", queries, documents, candidates, queries_mask, documents_mask, zero_floor)
    differentiate = recording("maxsim", operands)
    if differentiate and save_documents and operands.q_values.requires_grad:
        scores = SavedAsInt8.apply(operands.q_values, operands.d_values, operands)
    elif torch.compiler.is_compiling():
        scores, _ = torch.ops.pylate_fastmaxsim.maxsim_forward(*operands, differentiate)
    elif differentiate:
        scores, _ = _Eager.apply(operands.q_values, operands.d_values, operands)
    else:
        scores, _ = _eager_forward(operands, False)
    return scores


def _paths(values: Tensor) -> tuple[ModuleType, ModuleType]:
    """The modules of forward and backward of such values."""
    return _kernels() if runs_kernels(values) else (blocked, blocked)


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from pylate_fastmaxsim.kernels.maxsim import launch as scores
    from pylate_fastmaxsim.kernels.winner_backward import launch as gradients

    return scores, gradients


# Schemas rather than `torch.library.custom_op`, whose wrappers cost the host more per call.
torch.library.define(
    "pylate_fastmaxsim::maxsim_forward",
    f"({SCHEMA}, bool want_winners) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "pylate_fastmaxsim::maxsim_backward",
    f"(Tensor grad_scores, Tensor winners, {SCHEMA}, bool need_q, bool need_d) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


# The float32 precision is read where the products run, as torch does: in a compiled graph and in the backward too.
def _scores_and_winners(operands: ScoringOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    values = operands.q_values
    path, _ = _paths(values)
    return path.forward(operands, want_winners, float32_precision(values.dtype))


def _gradients(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    values = operands.q_values
    _, path = _paths(values)
    return path.backward(grad_scores, winners, operands, float32_precision(values.dtype), need_q, need_d)


@torch.library.impl("pylate_fastmaxsim::maxsim_forward", "CompositeExplicitAutograd")
def _forward(*arguments):
    *fields, want_winners = arguments
    operands = ScoringOperands(*fields)
    check_numbers("maxsim", operands, want_winners)
    scores, winners = _scores_and_winners(operands, want_winners)
    if winners is None:
        # A registered operator returns tensors.
        shape, dtype = winner_layout(0, 0, 0, want=False)
        winners = scores.new_empty(shape, dtype=dtype)
    return scores, winners


@torch.library.impl("pylate_fastmaxsim::maxsim_backward", "CompositeExplicitAutograd")
def _backward(grad_scores, winners, *arguments):
    *fields, need_q, need_d = arguments
    return _gradients(grad_scores, winners, ScoringOperands(*fields), need_q, need_d)


@torch.library.register_fake("pylate_fastmaxsim::maxsim_forward")
def _forward_fake(*arguments):
    *fields, want_winners = arguments
    return fake_scores(ScoringOperands(*fields), want_winners)


@torch.library.register_fake("pylate_fastmaxsim::maxsim_backward")
def _backward_fake(grad_scores, winners, *arguments):
    *fields, need_q, need_d = arguments
    operands = ScoringOperands(*fields)
    return tuple(
        values.new_empty(values.shape if need else 0)
        for values, need in ((operands.q_values, need_q), (operands.d_values, need_d))
    )


def _save(ctx, operands: ScoringOperands, want_winners: bool, winners: Tensor) -> None:
    ctx.save_for_backward(winners, *operands.tensors)
    ctx.sizes, ctx.has_winners = operands.sizes, want_winners
    ctx.set_materialize_grads(False)


def _needed_gradients(ctx, grad_scores: Tensor | None, need_q: bool, need_d: bool) -> tuple[Tensor | None, ...]:
    """Gradients of both matrices of vectors, None for one that is not needed."""
    if grad_scores is None:
        return None, None
    check_winners("maxsim", ctx.has_winners)
    winners, *tensors = ctx.saved_tensors
    if is_plain_backward(grad_scores):
        grad_q, grad_d = _gradients(grad_scores, winners, ScoringOperands(*tensors, *ctx.sizes), need_q, need_d)
    else:
        grad_q, grad_d = torch.ops.pylate_fastmaxsim.maxsim_backward(
            grad_scores, winners, *tensors, *ctx.sizes, need_q, need_d
        )
    return grad_q if need_q else None, grad_d if need_d else None


def _setup_context(ctx, inputs, output):
    *fields, want_winners = inputs
    _save(ctx, ScoringOperands(*fields), want_winners, output[1])


def _differentiate(ctx, grad_scores, _):
    needed = ScoringOperands(*ctx.needs_input_grad[:NUM_FIELDS])
    gradients = _needed_gradients(ctx, grad_scores, needed.q_values, needed.d_values)
    return *gradients_of(*gradients), None


def _differentiate_twice(ctx, *_):
    raise NotImplementedError("maxsim: second derivatives are not supported; its backward cannot be differentiated.")


torch.library.register_autograd("pylate_fastmaxsim::maxsim_forward", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("pylate_fastmaxsim::maxsim_backward", _differentiate_twice)


def _eager_forward(operands: ScoringOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    # The dispatcher costs the host more than a launch.
    if is_plain(operands.q_values, operands.d_values):
        return _scores_and_winners(operands, want_winners)
    return torch.ops.pylate_fastmaxsim.maxsim_forward(*operands, want_winners)


class _Eager(torch.autograd.Function):
    """The registered autograd formula in a third of its host time. A compiled graph takes only the registered one.

    ``q_values`` and ``d_values`` are those of ``operands``, named once more for autograd to see them.
    """

    @staticmethod
    def forward(ctx, q_values, d_values, operands):
        scores, winners = _eager_forward(operands, True)
        ctx.mark_non_differentiable(winners)
        _save(ctx, operands, True, winners)
        return scores, winners

    @staticmethod
    def backward(ctx, grad_scores, _):
        return *_needed_gradients(ctx, grad_scores, *ctx.needs_input_grad[:2]), None
