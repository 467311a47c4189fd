"""Retrieval of documents that grow longer, for several poolings; of attacked ones see ``injection``.

Both modules work on token embeddings and know no library that made them:

- ``grades``, ``[Nq, Nd]``, is the grade of each document for each query: above 0 it is relevant (gold). NaN leaves a
  document out of the ranking of a query. :func:`grades_of` makes it of lists of gold documents.
- :func:`length_sweep` ranks lengthened documents; :func:`lengthened` makes them at the level of token embeddings.
- :func:`~pylate_fastmaxsim.diagnostics.injection.injection_sweep` ranks documents that carry injected tokens.
- Both sweeps return one row (a dict) for each setting and pooling, with ``pooling`` as it was given, ``ndcg@10`` and
  ``recall@1``, ``recall@5`` and ``recall@10``, the means over the queries. :func:`values_by_query` has those of each
  query, and the concentration of gradients.

nDCG@10 takes grades as gains. Recall@k is the share of a query's gold documents that are among the first k, so that
Recall@1 is at most 1 over their number. Of equal scores the document that comes first in the corpus comes first.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import Pooling, check_pooling
from pylate_fastmaxsim.tokens import TokenBatch

TIMES = (1, 2, 4, 8)
DEPTH = 10
RECALLS = (1, 5, 10)


def grades_of(gold: Sequence[Iterable[int]], num_documents: int) -> Tensor:
    """Grades ``[Nq, Nd]``, float32: 1 for the gold documents of each query, given by position, and 0 for the others.

    Examples
    --------
    >>> from pylate_fastmaxsim.diagnostics.robustness import grades_of
    >>> grades_of([[0], [1, 2]], num_documents=3)
    tensor([[1., 0., 0.],
            [0., 1., 1.]])
    """
    grades = torch.zeros(len(gold), num_documents)
    for query, documents in enumerate(gold):
        grades[query, list(documents)] = 1
    return grades


def retrieval_metrics(scores: Tensor, grades: Tensor) -> dict[str, Tensor]:
    """``ndcg@10`` and ``recall@k`` of each query, ``[Nq]``, from scores ``[Nq, Nd]`` and grades ``[Nq, Nd]``.

    A document with a score of -inf is not found.
    """
    scores = scores.masked_fill(grades.isnan(), -torch.inf)
    gains = grades.nan_to_num().clamp(min=0)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :DEPTH]
    found = gains.masked_fill(scores == -torch.inf, 0).gather(1, order)
    discounts = torch.arange(2, 2 + order.shape[1], device=scores.device).log2()
    best = gains.topk(order.shape[1]).values
    ndcg = (found / discounts).sum(dim=1) / (best / discounts).sum(dim=1)
    recalls = {f"recall@{k}": (found[:, :k] > 0).sum(dim=1) / (gains > 0).sum(dim=1) for k in RECALLS}
    return {"ndcg@10": ndcg, **recalls}


def values_by_query(
    queries: TokenBatch, documents: TokenBatch, grades: Tensor, pooling: Pooling
) -> dict[str, list[float]]:
    """The metrics of each query, and ``gini``: that of the gradient of its score with its gold document.

    Of several gold documents it is the first of the highest grade. See :func:`gradient_concentration`.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import Max, TokenBatch
    >>> from pylate_fastmaxsim.diagnostics.robustness import grades_of, values_by_query
    >>> queries = documents = TokenBatch.from_list([torch.eye(4)[:1], torch.eye(4)[1:]])
    >>> found = values_by_query(queries, documents, grades_of([[0], [0]], 2), Max())
    >>> found["recall@1"], found["gini"]
    ([1.0, 0.0], [0.0, 0.0])
    """
    check_sweep("values_by_query", queries, grades, [pooling])
    check_documents("values_by_query", documents, grades)
    metrics = retrieval_metrics(pooled_scores(queries, documents, pooling=pooling), grades)
    gold = documents.select(grades.nan_to_num(-torch.inf).argmax(dim=1))
    own = torch.arange(len(queries), device=queries.device)[:, None]
    gradients = gradient_concentration(queries, gold, own, pooling=pooling)
    return {"gini": [*gradients.ginis], **{name: values.tolist() for name, values in metrics.items()}}


@torch.no_grad()
def length_sweep(
    queries: TokenBatch,
    documents: Iterable[tuple[int, TokenBatch]],
    grades: Tensor,
    poolings: Sequence[Pooling],
) -> list[dict[str, Any]]:
    """Rank documents of several lengths.

    Parameters
    ----------
    queries
        Nq queries.
    documents
        Pairs of how many times as long the documents are and the Nd documents of that length, in the order of
        ``grades``; they may come from a generator.
    grades
        ``[Nq, Nd]``.
    poolings
        What to score with, each.

    Returns
    -------
    A row for each length and pooling: ``times``, ``tokens`` (live ones of a document, the mean), ``pooling`` and the
    metrics.

    Raises
    ------
    ValueError
        Shapes do not fit, a query has no gold document, or an embedding is NaN or infinite.
    TypeError
        A pooling is none.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import Max, Softmax, TokenBatch
    >>> from pylate_fastmaxsim.diagnostics.robustness import grades_of, length_sweep, lengthened
    >>> queries = documents = TokenBatch.from_list([torch.eye(3)[:1], torch.eye(3)[1:2]])
    >>> longer = lengthened(documents, TokenBatch.from_list([torch.eye(3)[2:]]), times=(1, 8))
    >>> rows = length_sweep(queries, longer, grades_of([[0], [1]], 2), [Max(), Softmax(1.0)])
    >>> [(row["times"], row["tokens"], row["recall@1"]) for row in rows]
    [(1, 1.0, 1.0), (1, 1.0, 1.0), (8, 8.0, 1.0), (8, 8.0, 1.0)]
    """
    check_sweep("length_sweep", queries, grades, poolings)
    rows = []
    for times, batch in documents:
        check_documents("length_sweep", batch, grades)
        tokens = sum(map(len, _live_tokens(batch))) / len(batch)
        for pooling in poolings:
            scores = pooled_scores(queries, batch, pooling=pooling)
            metrics = {name: values.mean().item() for name, values in retrieval_metrics(scores, grades).items()}
            rows.append({"times": times, "tokens": tokens, "pooling": pooling, **metrics})
    return rows


def lengthened(
    documents: TokenBatch,
    fillers: TokenBatch,
    times: Sequence[int] = TIMES,
    own: Sequence[int | None] | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, TokenBatch]]:
    """Documents with token embeddings of others behind their own, so that they are ``times`` as long as before.

    What is appended is the tokens of whole documents drawn from ``fillers``, the last one cut. A longer document begins
    with the shorter ones.

    Parameters
    ----------
    documents
        Nd documents.
    fillers
        Documents that are gold for no query; otherwise a document with them would be relevant for those of the filler.
    times
        Whole numbers from 1.
    own
        Which of the fillers a document is itself, which it does not get, ``[Nd]``; None for no one.
    seed
        Of the draws.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.diagnostics.robustness import lengthened
    >>> documents = TokenBatch.from_list([torch.zeros(2, 4), torch.zeros(3, 4)])
    >>> [(times, batch.lengths.tolist()) for times, batch in lengthened(documents, documents, (1, 3))]
    [(1, [2, 3]), (3, [6, 9])]
    """
    own_tokens, other_tokens = _live_tokens(documents), _live_tokens(fillers)
    drawn = draw_fillers([*map(len, own_tokens)], [*map(len, other_tokens)], max(times), own, seed)
    for factor in times:
        longer = []
        for tokens, some in zip(own_tokens, drawn, strict=True):
            tail = [other_tokens[filler] for filler in some]
            longer.append(torch.cat((tokens, *tail))[: factor * len(tokens)])
        yield factor, TokenBatch.from_list(longer)


def _live_tokens(batch: TokenBatch) -> list[Tensor]:
    values, live = batch.to_padded()
    return [tokens[kept] for tokens, kept in zip(values.detach(), live, strict=True)]


def draw_fillers(
    lengths: Sequence[int],
    filler_lengths: Sequence[int],
    times: int,
    own: Sequence[int | None] | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Draw the fillers of each document, in order, so that it is at least ``times`` as long with them; in any unit.

    ``own`` is as in :func:`lengthened`. ValueError if there is none that is not empty, or none but the document itself.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = {place for place, length in enumerate(filler_lengths) if length}
    drawn = []
    for document, length in enumerate(lengths):
        itself = own[document] if own is not None else None
        missing, some = (times - 1) * length, []
        if missing and not usable - {itself}:
            raise ValueError("draw_fillers: there must be another document to append that is not empty.")
        while missing > 0:
            one = int(torch.randint(len(filler_lengths), (), generator=generator))
            if one in usable and one != itself:
                some.append(one)
                missing -= filler_lengths[one]
        drawn.append(some)
    return drawn


def check_sweep(where: str, queries: TokenBatch, grades: Tensor, poolings: Sequence[Pooling]) -> None:
    """Refuse arguments of a sweep that do not fit together; ``where`` is the name in the error."""
    for pooling in poolings:
        check_pooling(where, pooling)
    if grades.dim() != 2 or len(grades) != len(queries):
        raise ValueError(f"{where}: grades must be [Nq, Nd] with Nq = {len(queries)}, got shape {tuple(grades.shape)}.")
    without = (~(grades > 0).any(dim=1)).nonzero().flatten().tolist()
    if without:
        raise ValueError(f"{where}: each query must have a gold document, but query {without[0]} has none.")
    _check_finite(where, "queries", queries)


def check_documents(where: str, documents: TokenBatch, grades: Tensor) -> None:
    """Refuse documents of another number than the grades have, or with embeddings that are NaN or infinite."""
    if len(documents) != grades.shape[1]:
        raise ValueError(
            f"{where}: there must be Nd = {grades.shape[1]} documents, as in grades, got {len(documents)}."
        )
    _check_finite(where, "documents", documents)


def _check_finite(where: str, name: str, batch: TokenBatch) -> None:
    if not bool(batch.values.isfinite().all()):
        raise ValueError(f"{where}: embeddings of {name} must be finite, but some are NaN or infinite.")
