"""Checks, autocast, whether a backward is wanted, and what no operator supports, for all operators that score."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pylate_fastmaxsim._checks import inside_transform, is_plain, require_tensor
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim._winners import winner_layout
from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.ops.dispatch import KERNEL_DTYPES
from pylate_fastmaxsim.tokens import TokenBatch, share_rows


def refuse_transforms(operator: str) -> None:
    """Raise NotImplementedError inside of torch.vmap, a transform of torch.func or a level of forward-mode derivatives.

    A registered operator would leave forward-mode derivatives out silently.
    """
    if inside_transform() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{operator}: torch.vmap, torch.func (grad, vjp, jvp, ...) and forward-mode derivatives are not supported; call "
            "it on whole batches, and differentiate with backward or torch.autograd.grad."
        )


def prepared(
    operator: str,
    queries: TokenBatch | Tensor,
    documents: TokenBatch | Tensor,
    candidates: Tensor | None,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    zero_floor: Tensor | None,
) -> ScoringOperands:
    """The arguments of a call after all checks, with the vectors cast as autocast casts them.

    ``operator`` is the name in the errors.
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
    _check_vectors(operator, queries, documents, q_values, d_values)
    check_choice(operator, queries, documents, candidates, zero_floor)
    operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
    if q_values is not queries.values or d_values is not documents.values:
        operands = operands._replace(q_values=q_values, d_values=d_values)
    return operands


def recording(operator: str, operands: ScoringOperands) -> bool:
    """Whether winners have to be kept for a backward.

    Raises ValueError where sequences share rows, which is checked on a CPU only: winners are kept for each row of the
    queries, and gradients written for each row of the documents.
    """
    q_values, d_values = operands.q_values, operands.d_values
    if not torch.is_grad_enabled() or not (q_values.requires_grad or d_values.requires_grad):
        return False
    gapless = operands.q_gapless and operands.d_gapless
    if q_values.is_cpu and not gapless and is_plain(operands.q_starts, operands.d_starts):
        _refuse_shared_rows(operator, operands, and_documents=d_values.requires_grad)
    return True


def _refuse_shared_rows(operator: str, operands: ScoringOperands, and_documents: bool) -> None:
    if not operands.q_gapless and share_rows(operands.q_starts, operands.q_lengths):
        raise_shared_rows(operator, "queries", "repeat the vectors")
    if and_documents and not operands.d_gapless and share_rows(operands.d_starts, operands.d_lengths):
        raise_shared_rows(operator, "documents", "name documents more than once in candidates, or repeat the vectors")


def raise_shared_rows(operator: str, name: str, instead: str) -> None:
    """Raise ValueError for sequences that share rows; ``instead`` is what to do."""
    raise ValueError(
        f"{operator}: {name} must not share rows of values where gradients are wanted, as they do after "
        f"TokenBatch.select with a repeated index; {instead}."
    )


def as_batch(operator: str, name: str, tokens: TokenBatch | Tensor, mask: Tensor | None) -> TokenBatch:
    """Queries or documents, by ``name``, as a ragged batch; TypeError or ValueError unless they are one or padded."""
    if isinstance(tokens, TokenBatch):
        if mask is not None:
            raise ValueError(f"{operator}: {name}_mask goes with padded {name}; a TokenBatch carries its own `keep`.")
        return tokens
    if isinstance(tokens, CompressedBatch):
        raise TypeError(
            f"{operator}: {name} are a CompressedBatch, which only maxsim takes, as documents; pass {name}.decompress()."
        )
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{operator}: {name} must be a TokenBatch or a tensor [N, L, d], got {type(tokens).__name__}.")
    return TokenBatch._of_padded(operator, name, tokens, f"{name}_mask", mask)


def _check_vectors(
    operator: str, queries: TokenBatch, documents: TokenBatch, q_values: Tensor, d_values: Tensor
) -> None:
    if q_values.dtype != d_values.dtype:
        raise ValueError(
            f"{operator}: queries are {q_values.dtype} and documents {d_values.dtype}; both must have one dtype."
        )
    if q_values.dtype not in KERNEL_DTYPES and q_values.dtype != torch.float64:
        raise ValueError(
            f"{operator}: token vectors must be bfloat16, float16, float32 or float64, got {q_values.dtype}."
        )
    require_one_device_and_dim(operator, queries, documents)


def require_one_device_and_dim(operator: str, queries: TokenBatch, documents: TokenBatch | CompressedBatch) -> None:
    """Raise ValueError unless queries and documents are on one device and have one d."""
    if queries.device != documents.device:
        raise ValueError(
            f"{operator}: queries are on {queries.device} and documents on {documents.device}; both must be on one."
        )
    if queries.dim != documents.dim:
        raise ValueError(
            f"{operator}: queries have d = {queries.dim} and documents d = {documents.dim}; both must have one d."
        )


def check_choice(
    operator: str,
    queries: TokenBatch,
    documents: TokenBatch | CompressedBatch,
    candidates: Tensor | None,
    zero_floor: Tensor | None,
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


def check_numbers(operator: str, operands: ScoringOperands, *settings: object) -> None:
    """Raise ValueError where numbers on a CPU do not fit. In a graph they are known only when it runs.

    ``settings`` are the operator's further arguments, of which the last says whether winners are wanted.
    """
    if not operands.q_values.is_cpu:
        return
    TokenBatch(
        operands.q_values, operands.q_starts, operands.q_lengths, operands.max_q_length,
        operands.q_keep, operands.q_gapless,
    )  # fmt: skip
    TokenBatch(
        operands.d_values, operands.d_starts, operands.d_lengths, operands.max_d_length,
        operands.d_keep, operands.d_gapless,
    )  # fmt: skip
    if settings[-1]:
        _refuse_shared_rows(operator, operands, and_documents=False)


def fake_scores(operands: ScoringOperands | CompressedOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores and winners as a graph is traced with, without numbers."""
    values = operands.q_values
    scores = values.new_empty((operands.q_starts.shape[0], operands.num_slots), dtype=sum_dtype(values.dtype))
    if not want_winners:
        return scores, None
    shape, dtype = winner_layout(operands.num_slots, values.shape[0], operands.max_d_length, True)
    return scores, values.new_empty(shape, dtype=dtype)


def fake_gradients(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, *settings: object
) -> tuple[Tensor, Tensor]:
    """Gradients of both matrices of vectors as a graph is traced with, without numbers.

    ``settings`` are the backward's further arguments, of which the last two say which gradients are needed.
    """
    *_, need_q, need_d = settings
    q_values, d_values = operands.q_values, operands.d_values
    return q_values.new_empty(q_values.shape if need_q else 0), d_values.new_empty(d_values.shape if need_d else 0)
