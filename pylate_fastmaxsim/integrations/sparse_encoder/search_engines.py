"""Search of sparse embeddings in the shape of Sentence Transformers' helpers for Qdrant, Seismic and others."""

import time

import torch
from torch import Tensor

from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex
from pylate_fastmaxsim.sparse import SparseBatch

Results = list[list[dict[str, int | float]]]


def semantic_search_fastmaxsim(
    query_embeddings: Tensor | list[Tensor],
    corpus_embeddings: Tensor | list[Tensor] | None = None,
    corpus_index: SparseIndex | None = None,
    top_k: int = 10,
    output_index: bool = False,
) -> tuple[Results, float] | tuple[Results, float, SparseIndex]:
    """Search sparse embeddings exactly, on their device, as the ``semantic_search_*`` of Sentence Transformers do.

    Needs no server, and not ``enable()``.

    Parameters
    ----------
    query_embeddings
        Nq queries as ``SparseEncoder.encode_query`` returns them: a tensor ``[Nq, vocabulary]``, sparse (COO, CSR or
        CSC) or dense, one ``[vocabulary]``, or a list of these.
    corpus_embeddings
        Nd documents in one of these forms. Used only without a ``corpus_index``.
    corpus_index
        An index of an earlier call, or any :class:`~pylate_fastmaxsim.SparseIndex`. Queries are moved to its device.
    top_k
        Number of documents to return for each query, at least 1.
    output_index
        Return the index too.

    Returns
    -------
    results
        For each query a list of ``{"corpus_id": int, "score": float}``, best first; of equal scores the lower id comes
        first. Only documents that share a term with the query, so there may be fewer than ``top_k``.
    seconds
        How long the search took, without the building of an index.
    index
        If ``output_index``.

    Raises
    ------
    ValueError
        There are neither embeddings of a corpus nor an index, a weight is negative or not finite, vocabularies differ,
        or ``top_k`` is below 1.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.integrations.sparse_encoder.search_engines import semantic_search_fastmaxsim
    >>> corpus = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 2.0, 1.0]]).to_sparse()
    >>> query = torch.tensor([0.0, 0.5, 0.0]).to_sparse()
    >>> results, seconds, index = semantic_search_fastmaxsim(query, corpus, output_index=True)
    >>> results
    [[{'corpus_id': 0, 'score': 1.0}, {'corpus_id': 2, 'score': 1.0}]]
    >>> results, seconds = semantic_search_fastmaxsim(corpus, corpus_index=index, top_k=1)
    >>> [hits[0]["corpus_id"] for hits in results]
    [0, 1, 0]
    """
    if corpus_index is None:
        if corpus_embeddings is None:
            raise ValueError("semantic_search_fastmaxsim: pass corpus_embeddings or corpus_index; both are None.")
        corpus_index = SparseIndex.build([_batch(corpus_embeddings)])
    begin = time.perf_counter()
    scores, positions = corpus_index.search(_batch(query_embeddings).to(corpus_index.device), top_k)
    results = [
        [{"corpus_id": position, "score": score} for position, score in zip(*row, strict=True) if position >= 0]
        for row in zip(positions.tolist(), scores.tolist(), strict=True)
    ]
    seconds = time.perf_counter() - begin
    return (results, seconds, corpus_index) if output_index else (results, seconds)


def _batch(embeddings: Tensor | list[Tensor]) -> SparseBatch:
    return SparseBatch.from_torch(torch.stack(embeddings) if isinstance(embeddings, list) else embeddings)
