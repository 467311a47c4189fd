"""Exact search over a streamed corpus: all documents are scored, and each query's best stay on the device."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import Max, Pooling
from pylate_fastmaxsim.retrieval.corpus import TOKENS_PER_BATCH, Corpus
from pylate_fastmaxsim.retrieval.formats.reading import read_ahead
from pylate_fastmaxsim.retrieval.topk import largest, merge
from pylate_fastmaxsim.tokens import TokenBatch, Tokens, as_batch, token_batches

# Scores of one batch of documents that are computed at once, 256 MiB of float32; more queries are scored in turn. With
# the keys that the best are found by that is 1 GiB.
SCORES_AT_ONCE = 1 << 26

# Pairs of a query and a candidate that are rescored at once.
PAIRS_AT_ONCE = 1 << 18

Rescore = Corpus | Callable[[Tensor], Tensor]


class SearchResult(tuple):
    """``(scores, positions)`` of :func:`search`, a pair, with what rescoring tells of its candidates.

    ``from_last_tenth``, int64 ``[Nq]``: how many of a query's results were in the last tenth of its candidates, before
    they were rescored. None without ``rescore``. If it is 0 for nearly all queries, more candidates would find no more.
    If it is about a tenth of the results, good documents are as frequent among the last candidates as among the first,
    and more of them lie behind: raise ``candidates_per_result``, unless all documents were candidates.
    """

    from_last_tenth: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        return self[0]

    @property
    def positions(self) -> Tensor:
        return self[1]


@torch.no_grad()
def search(
    queries: Tokens,
    documents: Corpus | Tokens | CompressedBatch | Iterable[Tokens | CompressedBatch],
    k: int,
    *,
    pooling: Pooling = Max(),
    rescore: Rescore | None = None,
    candidates_per_result: int = 4,
    progress: Callable[[int], object] | None = None,
) -> SearchResult:
    """The ``k`` documents of each query with the highest MaxSim or pooled score, found without an index.

    Takes one batch of documents at a time and keeps only the best scores, so the corpus may have any size. The larger
    the batches, the better they fill a GPU. Of equal scores the earlier document comes first.

    With ``rescore`` the ``candidates_per_result * k`` best of each query are scored again, and the best ``k`` of these
    are returned: documents in a small format find the candidates, and a larger format or another model ranks them.

    Parameters
    ----------
    queries
        Nq queries, on the device that scores, in any form that :func:`pylate_fastmaxsim.maxsim` takes, as the list that
        ``encode`` of a model returns.
    documents
        Documents in any such form or compressed, or batches of these, which may come from a generator, all of the d and
        device of the queries, and compressed or of their dtype. Or a
        :class:`~pylate_fastmaxsim.retrieval.corpus.Corpus`, to whose dtype queries are rounded unless it is compressed.
    k
        Number of documents to return for each query, at least 1.
    pooling
        As in :func:`pylate_fastmaxsim.pooled_scores`, which decompresses compressed documents with another than ``Max()``.
    rescore
        A corpus of the same documents in the same order. Of each document that is a candidate its tokens are read once,
        for all queries, in blocks of about a million tokens. Or a function, as of a cross-encoder: called once with the
        positions of all candidates, ``[Nq, C]``, int64, best first, on the device of the queries, it returns their scores
        ``[Nq, C]``. C is ``candidates_per_result * k``, or Nd if that is less.
    candidates_per_result
        How many candidates to rescore for each of the ``k`` results, at least 1.
    progress
        Called after each batch with its number of documents, as ``update`` of a tqdm bar is.

    Returns
    -------
    SearchResult
        A pair of scores and positions:

        scores: best first, ``[Nq, min(k, Nd)]`` for Nd documents in all, float32 (float64 for float64 input). A NaN comes
        before every number.

        positions: which document each score is of, counted through all batches, ``[Nq, min(k, Nd)]``, int64.

        With ``rescore`` its ``from_last_tenth`` tells whether candidates were too few (:class:`SearchResult`).

    Raises
    ------
    ValueError
        ``k`` or ``candidates_per_result`` is below 1, a batch does not fit the queries (see
        :func:`pylate_fastmaxsim.maxsim`), or ``rescore`` has another d or number of documents, or returns another shape.
    TypeError
        ``k`` is no integer, ``pooling`` is not one, queries or something in the documents is no batch, or ``rescore`` is
        something else.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.retrieval.search import search
    >>> queries = TokenBatch.from_list([torch.eye(2)])
    >>> batches = [TokenBatch.from_list([size * torch.eye(2), torch.eye(2)]) for size in (2.0, 3.0)]
    >>> search(queries, batches, k=2)
    (tensor([[6., 4.]]), tensor([[2, 0]]))
    >>> search([torch.eye(2)], [torch.eye(2), torch.ones(1, 2)], k=1)
    (tensor([[2.]]), tensor([[0]]))
    >>> relevance = torch.tensor([0.1, 0.9, 0.5, 0.4])  # of another model, for each document
    >>> scores, positions = search(queries, batches, k=1, candidates_per_result=2, rescore=relevance.__getitem__)
    >>> scores, positions
    (tensor([[0.5000]]), tensor([[2]]))
    """
    k = require_count("search", "k", k)
    candidates_per_result = require_count("search", "candidates_per_result", candidates_per_result)
    queries = as_batch("search", "queries", queries)
    if not (rescore is None or isinstance(rescore, Corpus) or callable(rescore)):
        raise TypeError(f"search: rescore must be None, a Corpus or a function, got {type(rescore).__name__}.")
    as_scored = queries
    # Before a search that may take hours.
    if isinstance(rescore, Corpus) and rescore.dim != queries.dim:
        raise ValueError(f"search: rescore must have the d = {queries.dim} of the queries, but has d = {rescore.dim}.")
    if isinstance(documents, Corpus):
        if isinstance(rescore, Corpus):
            _require_same_length(rescore, len(documents))
        as_scored = rounded(queries, documents)
        documents = documents.batches(queries.device)
    documents = token_batches("search", "documents", documents, CompressedBatch)
    wanted = k if rescore is None else candidates_per_result * k
    scores, positions, seen = _best(as_scored, documents, wanted, pooling, progress)
    if rescore is None:
        return SearchResult((scores, positions))
    if isinstance(rescore, Corpus):
        _require_same_length(rescore, seen)
        scores = _rescored(rounded(queries, rescore), positions, rescore, pooling)
    else:
        scores = _scores_of(rescore, positions)
    return ordered(scores, positions, k)


def _require_same_length(rescore: Corpus, documents: int) -> None:
    if len(rescore) != documents:
        raise ValueError(
            f"search: rescore must hold the same documents, but has {len(rescore)} where {documents} are searched."
        )


def _best(
    queries: TokenBatch,
    documents: Iterable[TokenBatch | CompressedBatch],
    k: int,
    pooling: Pooling,
    progress: Callable[[int], object] | None,
) -> tuple[Tensor, Tensor, int]:
    """Scores and positions of the best documents of a stream, and how many documents there were."""
    scores = torch.empty(len(queries), 0, dtype=sum_dtype(queries.values.dtype), device=queries.device)
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    seen = 0
    for batch in documents:
        if len(batch) == 0:
            continue
        rows = max(1, SCORES_AT_ONCE // len(batch))
        numbers = torch.arange(len(queries), device=queries.device)
        some = [queries] if len(queries) <= rows else map(queries.select, numbers.split(rows))
        merged = [
            merge(best, places, pooled_scores(asked, batch, pooling=pooling), seen, k)
            for asked, best, places in zip(some, scores.split(rows), positions.split(rows), strict=True)
        ]
        scores, positions = (torch.cat(parts) for parts in zip(*merged, strict=True))
        seen += len(batch)
        if progress is not None:
            progress(len(batch))
    return scores, positions, seen


def rounded(queries: TokenBatch, corpus: Corpus) -> TokenBatch:
    """Queries as a corpus is scored with them."""
    return queries if corpus.dtype is None else queries.with_values(queries.values.to(corpus.dtype))


def _rescored(queries: TokenBatch, positions: Tensor, corpus: Corpus, pooling: Pooling) -> Tensor:
    """Scores of the documents at ``positions [Nq, C]``."""
    documents, places = positions.flatten().unique(return_inverse=True)
    which = torch.arange(len(queries), device=queries.device).repeat_interleave(positions.shape[1])
    batches = selected(corpus, documents.cpu(), queries.device)
    return pair_scores(queries, which, places, batches, pooling).view_as(positions)


def selected(corpus: Corpus, positions: Tensor, device: torch.device) -> Iterator[TokenBatch | CompressedBatch]:
    """The documents at ascending positions, in batches on the device. One is read while another is scored."""
    blocks = corpus.blocks(positions, TOKENS_PER_BATCH)
    for batch in read_ahead(len(blocks), 2, lambda number, _: corpus.select(blocks[number])):
        yield batch.to(device)


@torch.no_grad()
def pair_scores(
    queries: TokenBatch,
    which: Tensor,
    places: Tensor,
    batches: Iterable[TokenBatch | CompressedBatch],
    pooling: Pooling = Max(),
) -> Tensor:
    """Scores ``[P]`` of pairs: the query ``which[i]`` and the document ``places[i]``, counted through all batches."""
    scores = torch.empty(places.shape, dtype=sum_dtype(queries.values.dtype), device=queries.device)
    ascending, pairs = places.sort()
    first = begin = 0
    for batch in batches:
        end = int(torch.searchsorted(ascending, first + len(batch)))
        for inside in pairs[begin:end].split(PAIRS_AT_ONCE):
            # A query for each pair, which has one candidate: queries may differ in how many they have in this batch.
            candidates = (places[inside] - first)[:, None]
            scores[inside] = pooled_scores(queries.select(which[inside]), batch, candidates, pooling=pooling)[:, 0]
        first, begin = first + len(batch), end
    return scores


def _scores_of(rescore: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor:
    scores = rescore(positions)
    if not isinstance(scores, Tensor) or scores.shape != positions.shape or not scores.is_floating_point():
        got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"search: rescore must return scores, floating point {[*positions.shape]}, got {got}.")
    return scores.to(positions.device, sum_dtype(scores.dtype))


def ordered(scores: Tensor, positions: Tensor, k: int) -> SearchResult:
    """The best ``k`` of candidates, whose order before is that of the columns."""
    # Of equal scores the lower position comes first.
    positions, columns = positions.sort(dim=1)
    scores = scores.gather(1, columns)
    order = largest(scores, min(k, scores.shape[1]))
    last_tenth = columns >= scores.shape[1] - -(-scores.shape[1] // 10)
    result = SearchResult((scores.gather(1, order), positions.gather(1, order)))
    result.from_last_tenth = last_tenth.gather(1, order).sum(1)
    return result
