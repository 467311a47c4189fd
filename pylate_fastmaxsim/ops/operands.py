"""Operands of all operators: checks, autocast, whether a backward is wanted, and whether kernels or blocked PyTorch compute."""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pylate_fastmaxsim._checks import has_numbers, inside_transform, require_tensor
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch, share_rows

logger = logging.getLogger("pylate_fastmaxsim")

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_kernels(values: Tensor) -> bool:
    """Say whether the Triton kernels take such values."""
    return values.is_cuda and values.dtype in KERNEL_DTYPES and has_kernels(values.device)


def path(name: str, blocked: ModuleType, values: Tensor) -> ModuleType:
    """The module that computes an operator of such values: of its kernels, or ``blocked`` PyTorch."""
    return kernels(name) if runs_kernels(values) else blocked


def computed(name: str, blocked: ModuleType, function: str) -> Callable:
    """The function of this name of both modules of :func:`path`, which have one signature. The first tensor chooses.

    That is a tensor of vectors, or the gradient of what was computed from them, which has another dtype, but float64 only
    for float64.
    """

    @functools.wraps(getattr(blocked, function))
    def call(first: Tensor | tuple[Tensor, ...], *arguments: object) -> object:
        values = first if isinstance(first, Tensor) else first[0]
        return getattr(path(name, blocked, values), function)(first, *arguments)

    return call


@functools.cache
def kernels(name: str) -> ModuleType:
    """The module that launches the kernels of this folder; imported late, since it needs Triton."""
    return importlib.import_module(f"pylate_fastmaxsim.kernels.{name}.launch")


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Say whether Triton kernels run on a CUDA device. Logs a warning once if they do not."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        logger.warning(
            "maxsim: the kernels need an NVIDIA GPU of compute capability 8.0 or newer; tensors on %s (%s) are scored by "
            "blocked PyTorch.",
            device,
            torch.cuda.get_device_name(device),
        )
        return False
    return _has_triton()


@functools.cache
def _has_triton() -> bool:
    try:
        importlib.import_module("pylate_fastmaxsim.kernels.maxsim.launch")
    except ImportError as error:
        logger.warning("maxsim: Triton cannot be imported (%s); CUDA tensors are scored by blocked PyTorch.", error)
        return False
    return True


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
    queries: Tokens,
    documents: Tokens,
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
    if getattr(documents, "ndim", None) == 4:  # of each query, as in distillation
        if candidates is not None:
            raise ValueError(
                f"{operator}: candidates go with documents [Nd, L, d], not with [Nq, K, L, d] of each query."
            )
        num_queries, ways = queries.starts.shape[0], documents.shape[1]
        in_groups = functools.partial(_flattened, operator, num_queries, ways)
        documents, documents_mask = in_groups("documents", documents), in_groups("documents_mask", documents_mask)
        zero_floor = in_groups("zero_floor", zero_floor)
        candidates = torch.arange(num_queries * ways, device=queries.device).view(num_queries, ways)
    documents = as_batch(operator, "documents", documents, documents_mask)
    q_values, d_values = queries.values, documents.values
    q_values, d_values = cast_by_autocast(q_values, d_values)
    require_one_dtype(operator, "queries", q_values, "documents", d_values)
    require_vector_dtype(operator, "token vectors", q_values)
    require_one_device_and_dim(operator, queries, documents)
    check_candidates(operator, queries, documents, candidates, zero_floor)
    operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
    if q_values is not queries.values or d_values is not documents.values:
        operands = operands._replace(q_values=q_values, d_values=d_values)
    return operands


def _flattened(operator: str, num_queries: int, ways: int, name: str, value: object) -> object:
    """An array ``[Nq, K, ...]`` as ``[Nq * K, ...]``."""
    if not isinstance(value, (Tensor, np.ndarray)):
        return value
    if tuple(value.shape[:2]) != (num_queries, ways):
        raise ValueError(
            f"{operator}: {name} of each query must begin with [Nq, K] = [{num_queries}, {ways}], got shape "
            f"{tuple(value.shape)}."
        )
    return value.reshape(num_queries * ways, *value.shape[2:])


def recording(operator: str, operands: ScoringOperands | CompressedOperands) -> bool:
    """Say whether a backward needs winners.

    Raises ValueError where sequences share rows, which is checked on a CPU only: winners are kept for each row of the
    queries, and gradients written for each row of the documents.
    """
    q_values, d_values = operands.q_values, operands.d_values
    if not torch.is_grad_enabled() or not (q_values.requires_grad or d_values.requires_grad):
        return False
    refuse_shared_rows(operator, "queries", operands.q_starts, operands.q_lengths, operands.q_gapless)
    if d_values.requires_grad:
        instead = "name documents more than once in candidates, or repeat the vectors"
        refuse_shared_rows(operator, "documents", operands.d_starts, operands.d_lengths, operands.d_gapless, instead)
    return True


def refuse_shared_rows(
    operator: str, name: str, starts: Tensor, lengths: Tensor, gapless: bool, instead: str = "repeat the vectors"
) -> None:
    """Raise ValueError where sequences on a CPU share rows; ``instead`` is what to do."""
    if not gapless and has_numbers(starts, lengths) and share_rows(starts, lengths):
        raise ValueError(
            f"{operator}: {name} must not share rows of values where gradients are wanted, as they do after "
            f"TokenBatch.select with a repeated index; {instead}."
        )


def autocast_dtype(*tensors: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts the operands of a product to, or None where it leaves them alone."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) and all(tensor.dtype in KERNEL_DTYPES for tensor in tensors):
        return torch.get_autocast_dtype(device)
    return None


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product as autocast casts them."""
    dtype = autocast_dtype(*tensors)
    return tensors if dtype is None else tuple([tensor.to(dtype) for tensor in tensors])


def require_one_dtype(operator: str, name: str, values: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError unless both are of one dtype."""
    if values.dtype != other.dtype:
        raise ValueError(
            f"{operator}: {name} are {values.dtype} and {other_name} {other.dtype}; both must have one dtype."
        )


def require_vector_dtype(operator: str, name: str, values: Tensor) -> None:
    """Raise ValueError unless products of the values can be summed: bfloat16, float16, float32 or float64."""
    if values.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise ValueError(f"{operator}: {name} must be bfloat16, float16, float32 or float64, got {values.dtype}.")


def require_projection(operator: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: str) -> None:
    """Raise TypeError or ValueError unless a weight of ``shape`` and its bias are on the device of the hidden states."""
    require_tensor(operator, "weight", weight, shape, 2, device=hidden.device)
    if bias is not None:
        require_tensor(operator, "bias", bias, f"{shape.partition(',')[0]}]", 1, device=hidden.device)


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


def check_candidates(
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
        allowed = "int64 [Nq, K] with Nq = {}"
        require_tensor(operator, "candidates", candidates, allowed, (num_queries, None), (torch.int64,), queries.device)
    if zero_floor is not None:
        allowed = "bool [Nd] with Nd = {}"
        require_tensor(operator, "zero_floor", zero_floor, allowed, (num_documents,), (torch.bool,), queries.device)


def check_numbers(operator: str, operands: ScoringOperands | CompressedOperands, *settings: object) -> None:
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
        refuse_shared_rows(operator, "queries", operands.q_starts, operands.q_lengths, operands.q_gapless)


def fake_scores(operands: ScoringOperands | CompressedOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores and winners as a graph is traced with, without numbers."""
    values = operands.q_values
    scores = values.new_empty((operands.q_starts.shape[0], operands.num_slots), dtype=sum_dtype(values.dtype))
    if not want_winners:
        return scores, None
    shape = operands.num_slots, values.shape[0]
    return scores, values.new_empty(shape, dtype=winner_dtype(operands.max_d_length))


def fake_gradients(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, *settings: object
) -> tuple[Tensor, Tensor]:
    """Gradients of both matrices of vectors as a graph is traced with, without numbers.

    ``settings`` are the backward's further arguments, of which the last two say which gradients are needed.
    """
    return fake_of((operands.q_values, operands.d_values), settings[-2:])


def fake_of(values: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """Gradients of values, empty where they are not needed, as a graph is traced with, without numbers."""
    return tuple([each.new_empty(each.shape if need else 0) for each, need in zip(values, needs, strict=True)])
