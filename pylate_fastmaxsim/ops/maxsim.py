"""MaxSim as a differentiable operator, registered with torch.library."""

from functools import partial

import numpy as np
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.cpu import maxsim as blocked
from pylate_fastmaxsim.ops.compressed import SavedAsInt8, SavedDocuments, compressed_scores
from pylate_fastmaxsim.ops.operands import check_numbers, computed, fake_gradients, fake_scores, prepared, recording
from pylate_fastmaxsim.ops.registered import Operator, differentiable
from pylate_fastmaxsim.tokens import Tokens


def maxsim(
    queries: Tokens,
    documents: Tokens | CompressedBatch,
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
        Nq queries: a ``TokenBatch``, padded token vectors ``[Nq, Lq, d]``, a nested tensor of the layout ``torch.jagged``, or
        a list of matrices ``[L_i, d]`` as ``encode`` of a model returns it, tensors or arrays of NumPy; a list is copied.
        bfloat16, float16, float32 or float64. Or one query ``[Lq, d]``, which has no place in the shapes of masks,
        candidates and scores.
    documents
        Nd documents, likewise, of the same d, dtype and device. Or K of each query, as in distillation,
        ``[Nq, K, Ld, d]``, which stand for ``candidates``. Or a ``CompressedBatch`` of the same d and device, which is
        scored as it is stored, as :func:`pylate_fastmaxsim.reference.compressed_maxsim` defines it, and has no gradient.
    candidates
        Which documents each query scores, ``[Nq, K]``, int64, indices from 0 to Nd - 1 in any order, repeats allowed.
        ``None``: all. The range is checked on a CPU only; on a GPU the check would have to wait for the device.
    queries_mask
        With padded queries: tokens that count, ``[Nq, Lq]``, bool or 0/1, any pattern; or lengths ``[Nq]``, int64 or int32,
        the range of which is checked on a CPU only. ``None``: all.
    documents_mask
        With padded documents: tokens that count, ``[Nd, Ld]`` or ``[Nq, K, Ld]``; or lengths ``[Nd]`` or ``[Nq, K]``.
        ``None``: all.
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
        Scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates or documents of each query; of one query ``[Nd]`` or ``[K]``.
        float32, or float64 for float64 input.

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
    >>> maxsim(queries[0], torch.ones(3, 4, 2), documents_mask=torch.tensor([4, 1, 0]))
    tensor([2., 2., 0.])
    """
    if getattr(queries, "ndim", None) == 2:
        batches = [
            each[None] if isinstance(each, (Tensor, np.ndarray)) else each
            for each in (queries, candidates, queries_mask)
        ]
        return maxsim(
            batches[0], documents, batches[1], queries_mask=batches[2], documents_mask=documents_mask,
            zero_floor=zero_floor, save_documents=save_documents,
        )[0]  # fmt: skip
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
    else:
        scores, _ = _scores_and_winners(operands, differentiate)
    return scores


_scores_and_winners = differentiable(
    Operator(
        "maxsim_forward", computed("maxsim", blocked, "forward"), fake_scores, check=partial(check_numbers, "maxsim")
    ),
    ("scores", "winners"),
    ("q_values", "d_values"),
    Operator("maxsim_backward", computed("winner_backward", blocked, "backward"), fake_gradients),
    where="maxsim",
)
