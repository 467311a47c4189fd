"""Concentration of the gradient of scores or of a loss on few tokens of a document, and how many tokens ever win."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_tensor
from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.cpu.maxsim import require_candidates
from pylate_fastmaxsim.ops.operands import prepared
from pylate_fastmaxsim.ops.pooled import numbers_of, pooled_scores
from pylate_fastmaxsim.pooling import Pooling, TopK, check_pooling
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch

_NAME = "gradient_concentration"


@dataclass(frozen=True)
class GradientConcentration:
    """Measures of :func:`gradient_concentration`.

    Parameters
    ----------
    of
        Whose gradient it is: ``"score"``, that of each pair by itself, or ``"loss"``.
    gini
        Gini coefficient of the norms of the gradients of a document's M live tokens, mean over documents: 0 where all
        are equal, ``1 - 1/M`` where one token has everything. NaN where no document has a gradient.
    gini_uncorrected
        The same by the formula of "Spike hijacking in late-interaction retrieval": 1 minus ``2/M`` times the sum over i
        of the share that the i smallest norms have. It is lower by ``1/M`` for each document, -1/M where all are equal.
    documents
        How many documents have a gradient: those over which the two are means. Each pair has a document of its own.
    winning_share
        Share of the live tokens of all documents that win at least once.
    winners_per_document
        How many tokens of a document win at least once, mean over the documents with a live token.
    ginis
        That of each document, of which ``gini`` is the mean; of pairs in the order of ``candidates``, query by query. NaN
        where there is no gradient.
    """

    of: Literal["score", "loss"]
    gini: float
    gini_uncorrected: float
    documents: int
    winning_share: float
    winners_per_document: float
    ginis: tuple[float, ...] = field(repr=False)


def gradient_concentration(
    queries: Tokens,
    documents: Tokens,
    candidates: Tensor | None = None,
    *,
    pooling: Pooling,
    loss_gradient: Tensor | None = None,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
) -> GradientConcentration:
    """Measure how the gradient of scores or of a loss is spread over document tokens, and which tokens win.

    The gradient is that by the vectors given, in their inner products: behind the normalisation of an encoder. A token
    wins for a query token if it is the maximum or among the ``k`` of ``TopK(k)``. With ``Softmax`` and ``LogSumExp``,
    which give every token a weight, the winner is the token with the largest one. Vectors of 16 bits are taken as
    float32, so that their gradients are not rounded. Nothing that is given is changed. Waits for the device once, at the
    end.

    Parameters
    ----------
    queries, documents, queries_mask, documents_mask
        As in :func:`~pylate_fastmaxsim.pooled_scores`. They are copied, padded.
    candidates
        Which documents each query scores, int64 ``[Nq, K]``. ``None``: all, which is for a loss only.
    pooling
        ``Max()``, ``TopK(k)``, ``Softmax(temperature)`` or ``LogSumExp(temperature)``.
    loss_gradient
        Gradient of a loss by the scores, ``[Nq, Nd]``, or ``[Nq, K]`` with candidates, for the gradient of that loss by
        document tokens. ``None``: the gradient of the score of each pair that ``candidates`` names, for itself. Each
        pair then has a copy of its document.

    Raises
    ------
    ValueError
        There are neither candidates nor a gradient of a loss, its shape is another, or as in
        :func:`~pylate_fastmaxsim.pooled_scores`.
    TypeError
        An argument is of the wrong type.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import Max, Softmax
    >>> from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
    >>> queries = torch.tensor([[[1.0, 0.0], [0.8, 0.6]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]]])
    >>> positives = torch.tensor([[0]])
    >>> hard = gradient_concentration(queries, documents, positives, pooling=Max())
    >>> hard.of, round(hard.gini, 4), hard.winning_share, hard.winners_per_document
    ('score', 0.5, 0.5, 2.0)
    >>> round(gradient_concentration(queries, documents, positives, pooling=Softmax(1.0)).gini, 4)
    0.3801

    Of a loss:

    >>> scores = torch.tensor([[3.0]], requires_grad=True)
    >>> loss_gradient, = torch.autograd.grad((scores - 4).square().sum(), scores)
    >>> gradient_concentration(queries, documents, pooling=Max(), loss_gradient=loss_gradient).of
    'loss'
    """
    check_pooling(_NAME, pooling)
    queries = as_batch(_NAME, "queries", queries, queries_mask)
    documents = as_batch(_NAME, "documents", documents, documents_mask)
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        # All checks, under this name.
        prepared(_NAME, queries, documents, candidates, None, None, None)
        require_candidates(_NAME, candidates, len(documents))
        if loss_gradient is not None:
            require_tensor(_NAME, "loss_gradient", loss_gradient, "[Nq, Nd] or [Nq, K]")
            shape = (len(queries), len(documents) if candidates is None else candidates.shape[1])
            if loss_gradient.shape != shape:
                raise ValueError(
                    f"{_NAME}: loss_gradient must have the shape of the scores, {shape}, got {tuple(loss_gradient.shape)}."
                )
        elif candidates is None:
            raise ValueError(
                f"{_NAME}: pass candidates for the gradient of each pair's score, or loss_gradient for that of a loss."
            )
        q_values, q_mask = _padded(queries)
        d_values, d_mask = _padded(documents)
        if loss_gradient is None:
            d_values, d_mask = d_values[candidates.flatten()], d_mask[candidates.flatten()]
            candidates = torch.arange(candidates.numel(), device=candidates.device).view(candidates.shape)
        queries = TokenBatch.from_padded(q_values, q_mask)
        documents = TokenBatch.from_padded(d_values, d_mask)
        with torch.enable_grad():
            leaf = documents.values.requires_grad_()
            scores = pooled_scores(queries, documents.with_values(leaf), candidates, pooling=pooling)
            weights = torch.ones_like(scores) if loss_gradient is None else loss_gradient.detach().to(scores.dtype)
            (gradient,) = torch.autograd.grad(scores, leaf, weights)
        norms = gradient.norm(dim=-1)
        won = _won(queries, documents, candidates, pooling).sum().double()
        lengths = d_mask.sum(dim=1)
        ginis, counted = _ginis(norms.view(d_mask.shape), lengths)
        uncorrected = ginis - 1 / lengths
        means = [each.masked_fill(~counted, 0).sum() / counted.sum() for each in (ginis, uncorrected)]
        shares = [won / lengths.sum(), won / (lengths > 0).sum()]
        figures = torch.cat([torch.stack([*means, counted.sum(), *shares]), ginis])
    gini, uncorrected_gini, number, winning, winners, *each_gini = figures.tolist()
    of: Literal["score", "loss"] = "score" if loss_gradient is None else "loss"
    return GradientConcentration(of, gini, uncorrected_gini, int(number), winning, winners, tuple(each_gini))


def _ginis(norms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of each document, float64, and which have a gradient, ``[N]``.

    ``norms`` is ``[N, L]``, of which ``lengths [N]`` are of live tokens, in any places, and the others 0.
    """
    norms, lengths = norms.double().sort(dim=1).values, lengths[:, None].double()
    # From 1 for the smallest of a live token. Those of masked tokens come before it, and as zeros add nothing.
    rank = lengths - torch.arange(norms.shape[1] - 1, -1, -1, device=norms.device)
    total = norms.sum(dim=1)
    return ((2 * rank - lengths - 1) * norms).sum(dim=1) / (lengths[:, 0] * total), total != 0  # as NaN has


def _padded(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """A padded copy without gradient, in float32 if it was in 16 bits, and its mask."""
    values, mask = batch.to_padded()
    return values.detach().to(torch.promote_types(values.dtype, torch.float32)), mask


def _won(queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, pooling: Pooling) -> Tensor:
    """Rows of the documents' values that won for a query token, bool ``[Td]``. Rows of queries are padded."""
    operands = prepared(_NAME, queries, documents, candidates, None, None, None)
    if isinstance(pooling, TopK):
        _, winners = torch.ops.pylate_fastmaxsim.pooled_forward(*operands, *numbers_of(pooling), True)
    else:
        _, winners = torch.ops.pylate_fastmaxsim.maxsim_forward(*operands, True)
        winners = winners[:, None]  # [P, 1, Tq]
    if candidates is None:
        starts = documents.starts[:, None]
    else:
        starts = documents.starts[candidates].t().repeat_interleave(queries.max_length, dim=1)
    rows = starts[:, None] + winners
    rows = rows.masked_fill(winners == no_winner(winners.dtype), len(documents.values))
    return torch.zeros(len(documents.values) + 1, dtype=torch.bool, device=rows.device).index_fill_(
        0, rows.flatten(), True
    )[:-1]
