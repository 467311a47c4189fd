"""MaxSim as a differentiable operator: checks, autocast, dispatch to a kernel or to blocked PyTorch, autograd."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._dtypes import float32_precision, sum_dtype
from pylate_fastmaxsim._tracing import is_plain
from pylate_fastmaxsim._winners import winner_layout
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.ops import grad_filter as grad_filters
from pylate_fastmaxsim.ops.autograd import refuse_transforms
from pylate_fastmaxsim.ops.dispatch import KERNEL_DTYPES, runs_kernels
from pylate_fastmaxsim.ops.grad_filter import GradFilter
from pylate_fastmaxsim.tokens import TokenBatch


def maxsim(
    queries: TokenBatch | Tensor,
    documents: TokenBatch | Tensor,
    candidates: Tensor | None = None,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
    grad_filter: GradFilter = None,
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
        Nd documents, likewise, of the same d, dtype and device.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, indices from 0 to Nd - 1 in any order, repeats allowed.
        ``None``: all. The range is checked on a CPU only; on a GPU the check would have to wait for the device.
    queries_mask
        With padded queries: tokens that count, ``[Nq, Lq]``, bool or 0/1, any pattern. ``None``: all.
    documents_mask
        With padded documents: tokens that count, ``[Nd, Ld]``. ``None``: all.
    zero_floor
        Documents whose maxima start at 0 instead of -inf, ``[Nd]``, bool. Set it for documents with a masked token, to
        get the scores of libraries that multiply masked tokens by 0 rather than leave them out.
    grad_filter
        ``"auto"``: the backward skips pairs of a query and a document whose gradients are too small to matter. For each
        query they hold at most 2**-12 of the sum of its absolute gradients. ``None``: it skips only pairs of gradient
        0.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together, or ``grad_filter`` is neither ``"auto"`` nor ``None``. On a CPU
        also: a mask holds more than 0 and 1, a candidate is out of range, or sequences share rows where gradients are
        wanted.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Notes
    -----
    Under autocast, float32, bfloat16 and float16 vectors are cast to the autocast dtype first, as in ``einsum``.
    Otherwise float32 products follow ``torch.set_float32_matmul_precision`` and PyTorch's other switches for TF32. Sums
    are taken in float32. On a CPU, products of equal vectors may differ in the last bit, and then are not equal maxima:
    another of these tokens than the first may win, and have the gradient.

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
    grad_filters.check(grad_filter, "maxsim")
    queries, documents, q_values, d_values = prepared(
        "maxsim", queries, documents, candidates, queries_mask, documents_mask, zero_floor
    )
    differentiate, directly = recording("maxsim", queries, documents, q_values, d_values)
    if directly:
        forward = _Eager.apply
    else:
        compiling = torch.compiler.is_compiling()
        forward = torch.ops.pylate_fastmaxsim.maxsim_forward if compiling else _eager_forward
    scores, _ = forward(
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
        queries.max_length,
        documents.max_length,
        queries.gapless,
        documents.gapless,
        differentiate,
    )
    return grad_filters.filtered(scores) if differentiate and grad_filter else scores


def prepared(
    operator: str,
    queries: TokenBatch | Tensor,
    documents: TokenBatch | Tensor,
    candidates: Tensor | None,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    zero_floor: Tensor | None,
) -> tuple[TokenBatch, TokenBatch, Tensor, Tensor]:
    """Queries and documents as ragged batches, and their vectors as autocast has them, after all checks.

    ``operator`` is the name that stands in the errors.
    """
    refuse_transforms(operator)
    queries = as_batch(operator, "queries", queries, queries_mask)
    documents = as_batch(operator, "documents", documents, documents_mask)
    q_values, d_values = queries.values, documents.values
    if q_values.is_meta:
        raise ValueError(f"{operator}: queries are on the meta device, which holds no numbers to score.")
    device = q_values.device.type
    if torch.is_autocast_enabled(device) and q_values.dtype in KERNEL_DTYPES and d_values.dtype in KERNEL_DTYPES:
        dtype = torch.get_autocast_dtype(device)
        q_values, d_values = q_values.to(dtype), d_values.to(dtype)
    _check_vectors(operator, q_values, d_values)
    check_choice(operator, queries, documents, candidates, zero_floor)
    return queries, documents, q_values, d_values


def recording(
    operator: str, queries: TokenBatch, documents: TokenBatch, q_values: Tensor, d_values: Tensor
) -> tuple[bool, bool]:
    """Whether winners have to be kept for a backward, and whether an autograd.Function can keep them.

    It cannot in a graph; there the registered operator does. Raises ValueError where sequences
    share rows, looked at on a CPU only: winners are kept for each row of the queries, and gradients written for each of
    the documents.
    """
    if not torch.is_grad_enabled() or not (q_values.requires_grad or d_values.requires_grad):
        return False, False
    if torch.compiler.is_compiling():
        return True, False
    if q_values.is_cpu and is_plain(queries.starts, documents.starts):
        _refuse_shared_rows(operator, queries, documents if d_values.requires_grad else None)
    return True, True


def _refuse_shared_rows(operator: str, queries: TokenBatch, documents: TokenBatch | None) -> None:
    for name, batch, instead in (
        ("queries", queries, "repeat the vectors"),
        ("documents", documents, "name documents more than once in candidates, or repeat the vectors"),
    ):
        if batch is not None and batch.shares_rows():
            raise ValueError(
                f"{operator}: {name} must not share rows of values where gradients are wanted, as they do after "
                f"TokenBatch.select with a repeated index; {instead}."
            )


def as_batch(operator: str, name: str, tokens: TokenBatch | Tensor, mask: Tensor | None) -> TokenBatch:
    """Queries or documents, as ``name`` has it, as a ragged batch; TypeError or ValueError unless they can be one."""
    if isinstance(tokens, TokenBatch):
        if mask is not None:
            raise ValueError(f"{operator}: {name}_mask goes with padded {name}; a TokenBatch carries its own `keep`.")
        return tokens
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{operator}: {name} must be a TokenBatch or a tensor [N, L, d], got {type(tokens).__name__}.")
    return TokenBatch._of_padded(operator, name, tokens, f"{name}_mask", mask)


def _check_vectors(operator: str, q_values: Tensor, d_values: Tensor) -> None:
    if q_values.dtype != d_values.dtype:
        raise ValueError(
            f"{operator}: queries are {q_values.dtype} and documents {d_values.dtype}; both must have one dtype."
        )
    if q_values.dtype not in KERNEL_DTYPES and q_values.dtype != torch.float64:
        raise ValueError(
            f"{operator}: token vectors must be bfloat16, float16, float32 or float64, got {q_values.dtype}."
        )
    if q_values.device != d_values.device:
        raise ValueError(
            f"{operator}: queries are on {q_values.device} and documents on {d_values.device}; both must be on one."
        )
    if q_values.shape[1] != d_values.shape[1]:
        raise ValueError(
            f"{operator}: queries have d = {q_values.shape[1]} and documents d = {d_values.shape[1]}; both must have one d."
        )


def check_choice(
    operator: str, queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, zero_floor: Tensor | None
) -> None:
    """Raise TypeError or ValueError unless ``candidates`` and ``zero_floor`` fit these batches."""
    # Not `len`, which makes a symbolic size of torch.export a number.
    num_queries, num_documents = queries.starts.shape[0], documents.starts.shape[0]
    if candidates is not None:
        require_tensor(operator, "candidates", candidates, "int64 [Nq, K]")
        if candidates.dim() != 2 or candidates.shape[0] != num_queries or candidates.dtype != torch.int64:
            raise ValueError(
                f"{operator}: candidates must be int64 [Nq, K] with Nq = {num_queries}, "
                f"got {candidates.dtype} of shape {tuple(candidates.shape)}."
            )
        if candidates.device != queries.device:
            raise ValueError(
                f"{operator}: candidates must be on {queries.device}, as the queries, got {candidates.device}."
            )
    if zero_floor is not None:
        require_tensor(operator, "zero_floor", zero_floor, "bool [Nd]")
        if zero_floor.shape != (num_documents,) or zero_floor.dtype != torch.bool:
            raise ValueError(
                f"{operator}: zero_floor must be bool [Nd] with Nd = {num_documents}, "
                f"got {zero_floor.dtype} of shape {tuple(zero_floor.shape)}."
            )
        if zero_floor.device != queries.device:
            raise ValueError(
                f"{operator}: zero_floor must be on {queries.device}, as the queries, got {zero_floor.device}."
            )


def _path(values: Tensor) -> ModuleType:
    """The module that scores such values."""
    return _kernels() if runs_kernels(values) else blocked


@functools.cache
def _kernels() -> ModuleType:
    from pylate_fastmaxsim.kernels.maxsim import launch

    return launch


_TENSORS = (
    "Tensor q_values, Tensor q_starts, Tensor q_lengths, Tensor? q_keep, "
    "Tensor d_values, Tensor d_starts, Tensor d_lengths, Tensor? d_keep, "
    "Tensor? candidates, Tensor? zero_floor, SymInt max_q_length, SymInt max_d_length, bool q_gapless, bool d_gapless, "
)
# Schemas rather than `torch.library.custom_op`, whose wrappers cost the host more per call.
torch.library.define(
    "pylate_fastmaxsim::maxsim_forward",
    f"({_TENSORS}bool want_winners) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "pylate_fastmaxsim::maxsim_backward",
    f"(Tensor grad_scores, Tensor winners, {_TENSORS}bool need_q, bool need_d) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


# The float32 precision is read where the products run, as torch does: in a compiled graph too, and in the backward.
def _scores_and_winners(q_values, *arguments):
    return _path(q_values).forward(q_values, *arguments, float32_precision(q_values.dtype))


def require_numbers(operator: str, q_values, q_starts, q_lengths, q_keep, *arguments) -> None:
    """Raise ValueError where numbers on the host do not fit: in a graph they are not known before."""
    if not q_values.is_cpu:
        return
    d_values, d_starts, d_lengths, d_keep, _, _, max_q_length, max_d_length, q_gapless, d_gapless, want_winners = (
        arguments
    )
    queries = TokenBatch(q_values, q_starts, q_lengths, max_q_length, q_keep, q_gapless)
    TokenBatch(d_values, d_starts, d_lengths, max_d_length, d_keep, d_gapless)
    if want_winners:
        _refuse_shared_rows(operator, queries, None)


def _forward(*arguments):
    require_numbers("maxsim", *arguments)
    scores, winners = _scores_and_winners(*arguments)
    if winners is None:
        # A registered operator returns tensors.
        shape, dtype = winner_layout(0, 0, 0, want=False)
        winners = scores.new_empty(shape, dtype=dtype)
    return scores, winners


def _backward(grad_scores, winners, q_values, *arguments):
    *arguments, need_q, need_d = arguments
    precision = float32_precision(q_values.dtype)
    return _path(q_values).backward(grad_scores, winners, q_values, *arguments, precision, need_q, need_d)


torch.library.impl("pylate_fastmaxsim::maxsim_forward", "CompositeExplicitAutograd", _forward)
torch.library.impl("pylate_fastmaxsim::maxsim_backward", "CompositeExplicitAutograd", _backward)


def _eager_forward(q_values, q_starts, q_lengths, q_keep, d_values, *arguments):
    # The dispatcher costs the host more than a launch.
    forward = _scores_and_winners if is_plain(q_values, d_values) else torch.ops.pylate_fastmaxsim.maxsim_forward
    return forward(q_values, q_starts, q_lengths, q_keep, d_values, *arguments)


@torch.library.register_fake("pylate_fastmaxsim::maxsim_forward")
def _forward_fake(
    q_values, q_starts, q_lengths, q_keep, d_values, d_starts, d_lengths, d_keep,
    candidates, zero_floor, max_q_length, max_d_length, q_gapless, d_gapless, want_winners,
):  # fmt: skip
    columns = d_starts.shape[0] if candidates is None else candidates.shape[1]
    scores = q_values.new_empty((q_starts.shape[0], columns), dtype=sum_dtype(q_values.dtype))
    shape, dtype = winner_layout(columns, q_values.shape[0], max_d_length, want_winners)
    return scores, q_values.new_empty(shape, dtype=dtype)


@torch.library.register_fake("pylate_fastmaxsim::maxsim_backward")
def _backward_fake(grad_scores, winners, q_values, q_starts, q_lengths, q_keep, d_values, *arguments):
    need_q, need_d = arguments[-2:]
    return q_values.new_empty(q_values.shape if need_q else 0), d_values.new_empty(d_values.shape if need_d else 0)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(output[1], *inputs[:10])
    ctx.sizes = inputs[10:14]
    ctx.has_winners = inputs[14]
    ctx.set_materialize_grads(False)


def require_winners(operator: str, has_winners: bool) -> None:
    """Raise RuntimeError where winners were not kept, of which the backward would make gradients of 0."""
    if not has_winners:
        raise RuntimeError(
            f"{operator}: these scores pass no gradient, because they come from a graph that was traced with vectors that "
            "required none; trace or export it with vectors that require a gradient."
        )


def _differentiate(ctx, grad_scores, _):
    gradients = [None] * 15
    if grad_scores is not None:
        require_winners("maxsim", ctx.has_winners)
        need_q, need_d = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        # With gradients enabled somebody asks for second ones, which the registered operator refuses.
        # A compiled backward takes the registered operator as one, and a batch of gradients takes it for each of them.
        direct = (
            is_plain(grad_scores)
            and not torch.is_grad_enabled()
            and not torch._C._functorch.is_legacy_batchedtensor(grad_scores)
        )
        backward = _backward if direct else torch.ops.pylate_fastmaxsim.maxsim_backward
        grad_q, grad_d = backward(grad_scores, *ctx.saved_tensors, *ctx.sizes, need_q, need_d)
        gradients[0] = grad_q if need_q else None
        gradients[4] = grad_d if need_d else None
    return tuple(gradients)


def _differentiate_twice(ctx, *_):
    raise NotImplementedError("maxsim: second derivatives are not supported; its backward cannot be differentiated.")


class _Eager(torch.autograd.Function):
    """What `register_autograd` does below, in a third of its host time; a compiled graph takes only the latter."""

    @staticmethod
    def forward(ctx, *arguments):
        output = _eager_forward(*arguments)
        ctx.mark_non_differentiable(output[1])
        _save_for_backward(ctx, arguments, output)
        return output

    backward = staticmethod(_differentiate)


torch.library.register_autograd("pylate_fastmaxsim::maxsim_forward", _differentiate, setup_context=_save_for_backward)
torch.library.register_autograd("pylate_fastmaxsim::maxsim_backward", _differentiate_twice)
