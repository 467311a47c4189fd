"""Scores, projection, SPLADE's head, attention, pooling and search in plain PyTorch: the definitions that tests compare with.

Everything is padded, and the whole similarity tensor or score matrix is held.
"""

import torch
from scipy.cluster import hierarchy
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch, Residual, rounded_queries
from pylate_fastmaxsim.pooling import Max, Pooling, TopK
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch


def _similarities(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Similarities ``[Nq, P, Lq, Ld]``, live query tokens ``[Nq, Lq]``, and the documents' live tokens ``[Nd, Ld]``.

    The latter once more in the shape that broadcasts over the similarities.
    """
    query_values, query_mask = queries.to_padded()
    document_values, document_mask = documents.to_padded()
    if candidates is None:
        similarities = torch.einsum("qsh,dth->qdst", query_values, document_values)
        live = document_mask[None, :, None, :]
    else:
        similarities = torch.einsum("qsh,qdth->qdst", query_values, document_values[candidates])
        live = document_mask[candidates][:, :, None, :]
    return similarities, query_mask, document_mask, live


def _token_maxima(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None, zero_floor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Best similarity of each query token in each document, ``[Nq, P, Lq]``, where it is, and the live query tokens."""
    similarities, query_mask, document_mask, live = _similarities(queries, documents, candidates)

    # The maximum starts at 0 where there is no live token or where the caller asks for it.
    floor_is_zero = ~document_mask.any(dim=1)
    if zero_floor is not None:
        floor_is_zero = floor_is_zero | zero_floor
    floor_is_zero = floor_is_zero[None, :, None] if candidates is None else floor_is_zero[candidates][:, :, None]
    return *_best(similarities, live, floor_is_zero), query_mask


def _best(similarities: Tensor, live: Tensor, floor_is_zero: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima over the last dimension, and their positions: the first of equal ones, and -1 for the floor of 0.

    The floor comes before all tokens, so that a token wins only if it is better. Without a floor the first live token
    wins even if all similarities are -inf. A masked token never wins.
    """
    live = torch.cat([floor_is_zero.expand(similarities.shape[:-1])[..., None], live.expand_as(similarities)], dim=-1)
    values = torch.nn.functional.pad(similarities, (1, 0)).masked_fill(~live, -torch.inf)
    # NaN is the maximum of a row that holds one, and equals nothing.
    wins = live & ((values == values.amax(dim=-1, keepdim=True)) | values.isnan())
    place = wins.int().argmax(dim=-1, keepdim=True)
    return values.gather(-1, place).squeeze(-1), place.squeeze(-1) - 1


def maxsim(
    queries: TokenBatch,
    documents: TokenBatch,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
) -> Tensor:
    """Score queries against documents: each live query token takes its best live document token; sum over query tokens.

    ``score[i, j] = sum over live s of (max over live t of <q_is, d_jt>)``. The first of equal maxima
    wins (it receives the gradient), a document without a live token scores 0, and NaN in a live token
    gives NaN in every score that uses it.

    ``candidates``, int64 ``[Nq, K]``, are the documents that each query scores; ``None`` means all. ``zero_floor``, bool
    ``[Nd]``, names documents whose maxima start at 0 instead of -inf.

    Returns
    -------
    Tensor
        Scores ``[Nq, Nd]``, or ``[Nq, K]`` with candidates, in the dtype of the values.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.ones(1, 2)])
    >>> reference.maxsim(queries, documents)
    tensor([[2., 2.]])
    """
    maxima, _, query_mask = _token_maxima(queries, documents, candidates, zero_floor)
    return maxima.masked_fill(~query_mask[:, None, :], 0).sum(dim=-1)


def compressed_maxsim(queries: TokenBatch, documents: CompressedBatch, candidates: Tensor | None = None) -> Tensor:
    """Score queries against compressed documents, in float64.

    Documents are what ``decompress`` gives. Queries are rounded to the documents' format first, int8 and fp8 with a scale
    for each token; with residual codes they stay as they are, and documents are decompressed to their dtype. The
    gradient of a query is that of MaxSim with the decompressed documents, as if it were not rounded; documents have none.

    Returns
    -------
    Tensor
        Scores ``[Nq, Nd]``, or ``[Nq, K]`` with candidates ``[Nq, K]``, float64.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, compress, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[127.0, 0.4]])])
    >>> documents = compress(TokenBatch.from_list([torch.tensor([[254.0, 127.0], [2.0, 200.0]])]), "int8")
    >>> reference.compressed_maxsim(queries, documents)
    tensor([[32258.]], dtype=torch.float64)
    """
    if isinstance(documents.tokens, Residual):
        rounded, scales = queries.values.detach(), queries.values.new_ones(len(queries.values))
        vectors = documents.decompress(queries.values.dtype)
        vectors = vectors.with_values(vectors.values.double())
    else:
        rounded, scales = rounded_queries(queries.values, documents.format)
        vectors = documents.decompress(torch.float64)
    # Scales of queries come after the maximum, so that products of whole numbers are exact, and equal ones are equal.
    maxima, position, query_mask = _token_maxima(queries.with_values(rounded.double()), vectors, candidates, None)
    padded_scales = queries.with_values(scales.double()[:, None]).to_padded()[0].transpose(1, 2)
    # A document without a live token scores 0, also for a query with NaN.
    maxima = (maxima * padded_scales).masked_fill(position < 0, 0)
    # With one token more, so that there is one where all documents are empty.
    padded = torch.nn.functional.pad(vectors.to_padded()[0], (0, 0, 0, 1))
    of_slot = padded[None].expand(len(queries), -1, -1, -1) if candidates is None else padded[candidates]
    index = position.clamp(min=0)[..., None].expand(-1, -1, -1, documents.dim)
    winners = of_slot.gather(2, index).masked_fill(position[..., None] < 0, 0)
    values, _ = queries.to_padded()
    # Nothing but the gradient.
    passed = (values - values.detach()).double()[:, None].mul(winners).sum(dim=-1)
    return (maxima + passed.masked_fill(passed.isnan(), 0)).masked_fill(~query_mask[:, None, :], 0).sum(dim=-1)


def pooled_scores(
    queries: TokenBatch, documents: TokenBatch, candidates: Tensor | None = None, *, pooling: Pooling
) -> Tensor:
    """Score queries against documents: each live query token pools its similarities to a document's tokens; then the sum.

    A document without a live token scores 0. With top-k the lower position comes first of equal similarities, and NaN is
    larger than any number.

    Returns
    -------
    Tensor
        Scores ``[Nq, Nd]``, or ``[Nq, K]`` with candidates ``[Nq, K]``, in the dtype of the values.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import LogSumExp, Softmax, TokenBatch, TopK, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[1.0, 0.0]])])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [0.5, -1.0], [1.0, 0.0]]), torch.ones(1, 2)])
    >>> [reference.pooled_scores(queries, documents, pooling=each) for each in (TopK(2), Softmax(1.0), LogSumExp(1.0))]
    [tensor([[0.7500, 1.0000]]), tensor([[0.7259, 1.0000]]), tensor([[1.7944, 1.0000]])]
    """
    if isinstance(pooling, Max):
        return maxsim(queries, documents, candidates)
    similarities, query_mask, _, live = _similarities(queries, documents, candidates)
    if isinstance(pooling, TopK):
        # Of equal ones not any.
        similarities, _, live = _k_largest(similarities, live, pooling.k)
    return pooling.of(similarities, live).masked_fill(~query_mask[:, None, :], 0).sum(dim=-1)


def _k_largest(similarities: Tensor, live: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest similarities to live tokens, largest first, their positions, and which of them there are."""
    live = live.expand_as(similarities)
    values, order = similarities.masked_fill(~live, -torch.inf).sort(dim=-1, descending=True, stable=True)
    # Live tokens first where similarities are -inf themselves.
    first = live.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    order = order.gather(-1, first)
    return values.gather(-1, first), order, live.gather(-1, order)


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, normalize: bool = True) -> Tensor:
    """Token vectors ``[T, d]`` of hidden states ``[T, m]``: ``y = weight @ x + bias``, by ``normalize`` over its length.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import reference
    >>> reference.project(torch.tensor([[1.5, 2.0]]), 2 * torch.eye(2))
    tensor([[0.6000, 0.8000]])
    """
    values = torch.einsum("tm,hm->th", hidden, weight)
    if bias is not None:
        values = values + bias
    return torch.nn.functional.normalize(values, dim=1) if normalize else values


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    scale: float,
    reach: int = -1,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention ``[T, heads, d]`` of the rows of each text to its keys: ``softmax(scale * q @ k.T) @ v`` for each head.

    ``query`` is ``[T, heads, d]``, ``key`` and ``value`` are ``[S, heads, d]``; a row sees the keys at most ``reach`` places
    away, -1: all. ``keep``, ``[heads, T, max_length]`` by the place of a key in its text, has the weights that dropout
    leaves, which are divided by ``1 - dropout``. The result is 0 where a row sees no key.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import reference
    >>> value = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1)
    >>> texts = torch.tensor([0, 1, 3])
    >>> reference.attention(torch.zeros(3, 1, 1), torch.zeros(3, 1, 1), value, texts, texts, scale=1.0).flatten()
    tensor([1., 4., 4.])
    """
    states = []
    borders = zip(cu_seqlens[:-1], cu_seqlens[1:], key_cu_seqlens[:-1], key_cu_seqlens[1:], strict=True)
    for begin, end, key_begin, key_end in borders:
        logits = scale * torch.einsum("qhd,khd->hqk", query[begin:end], key[key_begin:key_end])
        apart = torch.arange(logits.shape[1])[:, None] - torch.arange(logits.shape[2])
        seen = (apart.abs() <= reach if reach >= 0 else torch.ones_like(apart, dtype=torch.bool)).to(logits.device)
        blind = ~seen.any(dim=-1, keepdim=True)
        weights = logits.masked_fill(~(seen | blind), -torch.inf).softmax(dim=-1).masked_fill(blind, 0)
        if keep is not None:
            weights = weights * keep[:, begin:end, : weights.shape[2]] / (1 - dropout)
        states.append(torch.einsum("hqk,khd->qhd", weights, value[key_begin:key_end]))
    return torch.cat(states)


def _xtr_token_maxima(
    queries: TokenBatch,
    documents: TokenBatch,
    k: int,
    candidates: Tensor | None,
    zero_floor: Tensor | None,
    normalizer: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and winner of every query token and document, ``[Nq, P, Lq]``, and the live query tokens."""
    similarities, query_mask, _, live = _similarities(queries, documents, None)
    similarities = similarities.masked_fill(~live, -torch.inf)

    all_tokens = similarities.transpose(1, 2).flatten(2)
    threshold = similarities.new_full((*all_tokens.shape[:2], 1), -torch.inf)
    if 0 < k <= all_tokens.shape[2]:
        threshold = all_tokens.topk(k).values[..., -1:]
    passes = live & ((similarities >= threshold[:, None]) | similarities.isnan())

    if normalizer == "retrieved":
        floor_is_zero = ~passes.any(dim=-1)
    else:
        # A live token that does not pass counts as 0; so do a document without a live token and a floor.
        floor_is_zero = (live & ~passes).any(dim=-1) | ~live.any(dim=-1)
    if zero_floor is not None:
        floor_is_zero = floor_is_zero | zero_floor[:, None]
    maxima, position = _best(similarities, passes, floor_is_zero)
    if candidates is not None:
        query = torch.arange(len(queries), device=queries.device)[:, None]
        maxima, position = maxima[query, candidates], position[query, candidates]
    return maxima, position, query_mask


def xtr_scores(
    queries: TokenBatch,
    documents: TokenBatch,
    k: int,
    candidates: Tensor | None = None,
    zero_floor: Tensor | None = None,
    normalizer: str = "positive",
) -> Tensor:
    """Score as XTR trains: of each query token only the k best document tokens of the whole batch count.

    As :func:`pylate_fastmaxsim.xtr_scores`, which see. The tokens of all documents compete, with candidates too.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> queries = TokenBatch.from_list([torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
    >>> documents = TokenBatch.from_list([torch.tensor([[0.5, 0.0], [2.0, 3.0]]), torch.ones(1, 2)])
    >>> reference.xtr_scores(queries, documents, k=1)
    tensor([[2.5000, 0.0000]])
    >>> reference.xtr_scores(queries, documents, k=2)
    tensor([[2.5000, 1.0000]])
    """
    maxima, position, query_mask = _xtr_token_maxima(queries, documents, k, candidates, zero_floor, normalizer)
    maxima = maxima.masked_fill(~query_mask[:, None, :], 0)
    counted = (position >= 0) & query_mask[:, None, :] if normalizer == "retrieved" else maxima > 0
    return maxima.sum(dim=-1) / counted.sum(dim=-1).to(maxima.dtype).clamp(min=1e-3)


def _logit_maxima(hidden: TokenBatch, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Best logit of each text for each vocabulary row in float64, ``[N, V]``, and which token gives it, -1 for none."""
    padded, live = hidden.to_padded()
    logits = torch.einsum("ntd,vd->nvt", padded.double(), weight.double())
    if bias is not None:
        logits = logits + bias.double()[:, None]
    return _best(logits, live[:, None], ~live.any(dim=1)[:, None])


def splade_pool(
    hidden: TokenBatch,
    weight: Tensor,
    bias: Tensor | None = None,
    activation_function: str | None = "relu",
    log1p: bool = True,
) -> Tensor:
    """SPLADE's max pooling in float64: ``f(max over live tokens t of <weight[v], hidden[t]> + bias[v])``.

    As :func:`pylate_fastmaxsim.splade_pool`, which says what f is. The first of equal maxima receives the gradient.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> hidden = TokenBatch.from_list([torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.ones(1, 2)])
    >>> reference.splade_pool(hidden, torch.eye(2), log1p=False)
    tensor([[1., 0.],
            [1., 1.]], dtype=torch.float64)
    """
    values, _ = _logit_maxima(hidden, weight, bias)
    if activation_function is not None:
        values = values.relu()
    for _ in range(log1p + (activation_function == "log1p_relu")):
        values = values.log1p()
    return values


def pool_tokens(
    documents: TokenBatch,
    factor: float | None = None,
    count: int | None = None,
    protected: int = 0,
    normalize: bool = False,
) -> list[Tensor]:
    """Means of Ward's clusters of the tokens of each document, a float64 matrix for each.

    As :func:`pylate_fastmaxsim.pool_tokens`, with the clusters of SciPy.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch, reference
    >>> document = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    >>> reference.pool_tokens(TokenBatch.from_list([document]), 1.5)
    [tensor([[0.9000, 0.3000],
            [0.0000, 1.0000]], dtype=torch.float64)]
    """
    pooled = []
    for padded, live in zip(*documents.to_padded(), strict=True):
        tokens = padded[live].double()
        first, rest = tokens[:protected], tokens[protected:]
        clusters = max(int(len(rest) // factor), 1) if count is None else count
        if clusters < len(rest):
            distances = (1 - rest.detach() @ rest.detach().t()).nan_to_num(2.0).clamp(0, 2)
            above = torch.triu_indices(len(rest), len(rest), 1)
            merges = hierarchy.linkage(distances[above[0], above[1]].numpy(), method="ward")
            labels = torch.from_numpy(hierarchy.fcluster(merges, t=clusters, criterion="maxclust")) - 1
            rest = torch.stack([rest[labels == label].mean(dim=0) for label in range(int(labels.max()) + 1)])
        means = torch.cat([first, rest])
        pooled.append(torch.nn.functional.normalize(means, dim=-1) if normalize else means)
    return pooled


def sparse_scores(queries: SparseBatch, documents: SparseBatch) -> Tensor:
    """Inner products ``[Nq, Nd]`` of sparse vectors in float64, summed in ascending order of terms.

    The product of two float32 numbers is exact in float64, so this order alone decides the bits of a score. It is 0 only
    where two vectors share no term.

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch, reference
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)]], vocabulary=3)
    >>> documents = SparseBatch.from_lists([[(2, 3.0)], [(1, 1.0)], [(0, 2.0), (2, 1.0)]], vocabulary=3)
    >>> reference.sparse_scores(queries, documents)
    tensor([[1.5000, 0.0000, 2.5000]], dtype=torch.float64)
    """
    scores = torch.zeros(len(queries), len(documents), dtype=torch.float64, device=queries.device)
    query_columns, document_columns = _columns(queries), _columns(documents)
    for term in sorted(query_columns.keys() & document_columns.keys()):
        rows, weights = query_columns[term]
        columns, document_weights = document_columns[term]
        scores[rows[:, None], columns] += weights[:, None] * document_weights
    return scores


def _columns(batch: SparseBatch) -> dict[int, tuple[Tensor, Tensor]]:
    """Vectors that hold each term that occurs, ascending, and its weights there in float64."""
    order = batch.terms.long().argsort(stable=True)
    terms, counts = batch.terms.long()[order].unique_consecutive(return_counts=True)
    rows = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), batch.offsets.diff())
    sizes = counts.tolist()
    columns = zip(rows[order].split(sizes), batch.weights.double()[order].split(sizes), strict=True)
    return dict(zip(terms.tolist(), columns, strict=True))


def sparse_top(queries: SparseBatch, documents: SparseBatch, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the largest inner products, of those that share a term with it.

    Parameters
    ----------
    queries, documents
        Nq and Nd vectors over the same vocabulary.
    k
        At least 1.

    Returns
    -------
    scores
        Largest first, ``[Nq, k]``: :func:`sparse_scores`, rounded to float32. 0 where there are fewer than ``k``.
    positions
        Of the documents, ``[Nq, k]``, int64. Of equal scores (after rounding) the lower comes first. -1 where there are
        fewer than ``k``.

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch, reference
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)]], vocabulary=3)
    >>> documents = SparseBatch.from_lists([[(2, 3.0)], [(1, 1.0)], [(0, 2.0), (2, 1.0)]], vocabulary=3)
    >>> reference.sparse_top(queries, documents, k=3)
    (tensor([[2.5000, 1.5000, 0.0000]]), tensor([[ 2,  0, -1]]))
    """
    exact = sparse_scores(queries, documents)
    # A product of two positive float32 numbers is above 0 in float64, though it may round to 0 in float32.
    ranked = torch.where(exact > 0, exact.float(), -1)
    ranked = torch.nn.functional.pad(ranked, (0, k), value=-1)
    scores, positions = ranked.sort(dim=1, descending=True, stable=True)
    scores, positions = scores[:, :k], positions[:, :k]
    return scores.clamp(min=0), positions.masked_fill(scores < 0, -1)
