"""Projection, normalisation and MaxSim from hidden states, differentiable, without float32 copies."""

from typing import Literal

from torch import Tensor

from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.cpu import projection as blocked
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.ops.operands import (
    autocast_dtype,
    check_candidates,
    computed,
    fake_of,
    refuse_transforms,
    require_one_dtype,
    require_projection,
    require_vector_dtype,
)
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import Tokens, as_batch

Projected = Literal["documents", "queries", "both"]


def maxsim_from_hidden(
    queries: Tokens,
    documents: Tokens,
    weight: Tensor,
    bias: Tensor | None = None,
    normalize: bool = True,
    candidates: Tensor | None = None,
    *,
    project: Projected = "documents",
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Score by MaxSim from hidden states: ``Linear -> L2-normalise -> MaxSim``.

    Each row of hidden states is projected and normalised once, in float32 on the chip. Unit vectors are kept in the dtype
    of the hidden states; see :func:`project_normalize`. Hidden states that win for no query token have gradient 0.

    Parameters
    ----------
    queries
        Nq queries, as in :func:`~pylate_fastmaxsim.maxsim`: token vectors of size d, or hidden states of size d_model if
        ``project`` names them.
    documents
        Nd documents, likewise.
    weight
        Weight of the projection, ``[d, d_model]``.
    bias
        ``[d]``. ``None``: none.
    normalize
        Whether projected vectors are divided by their length.
    candidates, zero_floor, queries_mask, documents_mask
        As in :func:`~pylate_fastmaxsim.maxsim`.
    project
        Which are hidden states: ``"documents"``, ``"queries"`` or ``"both"``. The others are token vectors.

    Returns
    -------
    Tensor
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates; float32, or float64 for float64 input.

    Raises
    ------
    ValueError
        ``project`` is none of the three, or shapes, dtypes or devices do not fit together, or as in
        :func:`~pylate_fastmaxsim.maxsim`.
    TypeError
        An argument is of the wrong type.
    NotImplementedError
        Second derivatives are asked for, or the call is inside of torch.vmap, torch.func or forward-mode derivatives.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, maxsim_from_hidden
    >>> weight = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> documents = TokenBatch.from_list([torch.tensor([[3.0, 4.0, 9.0]]), torch.tensor([[0.0, 2.0, 5.0]])])
    >>> maxsim_from_hidden(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), documents, weight)
    tensor([[1.4000, 1.0000]])
    """
    if project not in ("documents", "queries", "both"):
        raise ValueError(f'maxsim_from_hidden: project must be "documents", "queries" or "both", got {project!r}.')
    # Before the projection, which is most of the work.
    queries = as_batch("maxsim_from_hidden", "queries", queries, queries_mask)
    documents = as_batch("maxsim_from_hidden", "documents", documents, documents_mask)
    check_candidates("maxsim_from_hidden", queries, documents, candidates, zero_floor)
    if project != "documents":
        queries = queries.with_values(project_normalize(queries.values, weight, bias, normalize))
    if project != "queries":
        documents = documents.with_values(project_normalize(documents.values, weight, bias, normalize))
    return maxsim(queries, documents, candidates, zero_floor=zero_floor)


def project_normalize(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, normalize: bool = True) -> Tensor:
    """``F.normalize(F.linear(hidden, weight, bias), dim=-1)``, rounded when it is written: ``[..., d]``.

    ``hidden`` is ``[..., d_model]``, ``weight`` ``[d, d_model]`` of its dtype, or under autocast of any of bfloat16, float16 and
    float32, and ``bias`` ``[d]`` of the dtype of the weight. The result has the dtype of ``hidden``, or under autocast that of
    autocast; gradients of weight and bias are summed in float32 and have the dtype of these. Without ``normalize`` vectors
    are not divided by their length (or by 1e-12 where that is larger).

    Products, bias and norm are float32 (float64 for float64); float32 products follow PyTorch's switches for TF32. Rows
    that are wider than a tile are written before they are divided by their norm, and so rounded twice. The backward keeps
    the result and one number per row. Rows whose gradient is 0 cost it nothing, and their hidden states get gradient 0,
    even if they hold NaN. Differentiable once. Repeatable bit by bit. Errors are those of :func:`maxsim_from_hidden`.

    Examples
    --------
    >>> import torch
    >>> project_normalize(torch.tensor([[1.5, 2.0]]), 2 * torch.eye(2))
    tensor([[0.6000, 0.8000]])
    """
    refuse_transforms("project_normalize")
    require_tensor("project_normalize", "hidden states", hidden, "[..., d_model]")
    require_projection("project_normalize", hidden, weight, bias, "[d, d_model]")
    if not isinstance(normalize, bool):
        raise TypeError(f"project_normalize: normalize must be True or False, got {normalize!r}.")
    # The weight is cast where it is multiplied, and its gradient has its own dtype.
    dtype = autocast_dtype(hidden, weight)
    if dtype is not None:
        hidden = hidden.to(dtype)
    require_vector_dtype("project_normalize", "hidden states", hidden)
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            "project_normalize: hidden states must be [..., d_model] and weight [d, d_model], "
            f"got shapes {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if dtype is None:
        require_one_dtype("project_normalize", "hidden states", hidden, "weight", weight)
    if bias is not None:
        allowed = f"{weight.dtype} [d] with d = {{}}"
        require_tensor("project_normalize", "bias", bias, allowed, (weight.shape[0],), (weight.dtype,))
    # Not view(-1, d_model), which has no number of rows if d_model is 0.
    rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0)
    embeddings, _ = _embeddings_and_norms(rows, weight, bias, normalize)
    return embeddings.view(*hidden.shape[:-1], weight.shape[0]) if hidden.dim() != 2 else embeddings


def _forward_fake(hidden, weight, bias, normalize):
    rows = hidden.shape[0]
    inverse_norms = hidden.new_empty(rows if normalize else 0, dtype=sum_dtype(hidden.dtype))
    return hidden.new_empty(rows, weight.shape[0]), inverse_norms


def _backward_fake(grad, hidden, weight, embeddings, inverse_norms, normalize, *needs):
    return fake_of((hidden, weight, weight.new_empty(weight.shape[0])), needs)


_embeddings_and_norms = differentiable(
    Operator("project_forward", computed("projection", blocked, "forward"), _forward_fake),
    ("embeddings", "inverse_norms"),
    ("hidden", "weight", "bias"),
    Operator("project_backward", computed("projection", blocked, "backward"), _backward_fake),
    where="project_normalize",
)
