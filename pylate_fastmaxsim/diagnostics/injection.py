"""Attacks on the documents of a ranking by injected tokens, for several poolings in one pass over the similarities.

What ``grades`` and the rows of a sweep are, :mod:`~pylate_fastmaxsim.diagnostics.robustness` says.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.diagnostics.robustness import check_documents, check_sweep, retrieval_metrics
from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, TopK
from pylate_fastmaxsim.tokens import TokenBatch

COUNTS = (0, 25, 50, 100, 200, 400)
NOISE = 0.5

# Which tokens are injected, and whether into all documents or those that are not gold.
TARGETED, RANDOM, EVERYWHERE = "targeted", "random", "targeted, in all documents"
PARTIAL, SPIKE = "partial overlap", "spike"
KINDS = (TARGETED, RANDOM, PARTIAL, SPIKE)  # of tokens
ATTACKS = (*KINDS, EVERYWHERE)
# The tokens of a query that a spike lies near at once.
SPIKE_TOKENS = 3

SHARES = ("hijack_rate", "injected_weight")

QUERIES_AT_ONCE = 8
SIMILARITIES_AT_ONCE = 1 << 23


@torch.no_grad()
def injected_tokens(queries: TokenBatch, count: int, noise: float = NOISE, seed: int = 0) -> dict[str, Tensor]:
    """The tokens of each kind of attack on each query, ``[Nq, K, d]``, of unit length. Fewer tokens are the first of these.

    ``targeted`` token i lies near a live token q of the query: ``q / |q| + noise * g``, scaled to unit length, with normal
    g of expected squared length 1; its cosine with q is about ``1 / sqrt(1 + noise**2)``. The query's tokens take turns in
    a random order. With ``partial overlap`` the first half of that order take turns, as in a document that answers half of
    the query. A ``spike`` lies near the mean of three tokens, the next ones of that order, so that it is similar to all
    of them. ``random`` tokens are uniform on the unit sphere. The numbers are drawn on a CPU, so that they are the same on
    every device.
    """
    values, mask = queries.to_padded()
    counts = mask.sum(dim=1)
    if not bool((counts > 0).all()):
        raise ValueError("injected_tokens: each query must have a live token.")
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for tokens, live in zip(values.to(sum_dtype(values.dtype)), mask.cpu(), strict=True):
        places = live.nonzero().flatten()
        order = places[torch.randperm(len(places), generator=generator)].to(tokens.device)
        normal, free = torch.randn(2, count, queries.dim, generator=generator).to(tokens)
        own, turns = normalize(tokens[order], dim=1), torch.arange(count, device=tokens.device)
        spikes = normalize(torch.stack([own.roll(-step, 0) for step in range(SPIKE_TOKENS)]).sum(dim=0), dim=1)
        for kind, near in ((TARGETED, own), (PARTIAL, own[: -(-len(own) // 2)]), (SPIKE, spikes)):
            found[kind].append(normalize(near[turns % len(near)] + noise * normal / queries.dim**0.5, dim=1))
        found[RANDOM].append(normalize(free, dim=1))
    return {kind: torch.stack(tokens) for kind, tokens in found.items()}


@torch.no_grad()
def injection_sweep(
    queries: TokenBatch,
    documents: TokenBatch,
    grades: Tensor,
    poolings: Sequence[Pooling],
    counts: Sequence[int] = COUNTS,
    noise: float = NOISE,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rank documents of which some carry injected tokens, with all poolings in one pass over the similarities.

    Each query is ranked by itself: in its ranking, and there only, documents carry ``K`` more tokens, the same in all of
    them (see :func:`injected_tokens`). So each document is attacked on behalf of one query at a time. Nothing is copied:
    what is injected joins the running states of the documents.

    ``attack`` is a kind of token: ``targeted``, near those of the query in all documents that are not gold, as the hardest
    negatives; ``partial overlap``, near half of them; ``spike``, each near several of them; ``random``, unit vectors in
    the same documents, as a control. Or it is ``targeted, in all documents``: the targeted tokens in the gold documents
    too, as another control.

    Parameters
    ----------
    queries, documents
        Nq queries and Nd documents.
    grades
        ``[Nq, Nd]``.
    poolings
        What to score with, each.
    counts
        Values of K, from 0.
    noise, seed
        Of :func:`injected_tokens`.

    Returns
    -------
    A row for each attack, K and pooling: ``attack``, ``tokens`` (K), ``pooling``, the metrics, ``hijack_rate`` and
    ``injected_weight``. The last two are over all pairs of a live query token and a document that is not gold: the share of
    them in which an injected token has the largest similarity, whatever the pooling, and the share of the pooling's weight
    on injected tokens (of ``TopK`` the winners, of ``Softmax`` and ``LogSumExp`` the softmax weights; of ``Max`` both
    shares are the same).

    Raises
    ------
    ValueError
        Shapes do not fit, a query has no gold document or no live token, or an embedding is NaN or infinite.
    TypeError
        A pooling is none.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import Max, TokenBatch
    >>> from pylate_fastmaxsim.diagnostics.injection import injection_sweep
    >>> from pylate_fastmaxsim.diagnostics.robustness import grades_of
    >>> queries = TokenBatch.from_list([torch.eye(4)[:2]])
    >>> documents = TokenBatch.from_list([0.5 * torch.eye(4)[:2], torch.eye(4)[2:]])
    >>> rows = injection_sweep(queries, documents, grades_of([[0]], 2), [Max()], counts=(0, 4), noise=0.0)
    >>> [(row["attack"], row["tokens"], row["recall@1"], row["hijack_rate"]) for row in rows[:2]]
    [('targeted', 0, 1.0, 0.0), ('targeted', 4, 0.0, 1.0)]
    """
    check_sweep("injection_sweep", queries, grades, poolings)
    check_documents("injection_sweep", documents, grades)
    if not counts or len(set(counts)) < len(counts) or not all(isinstance(each, int) and each >= 0 for each in counts):
        raise ValueError(f"injection_sweep: counts must be different whole numbers from 0, got {counts!r}.")
    tokens = injected_tokens(queries, max(counts), noise, seed)
    sums: dict[tuple[str, int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in torch.arange(len(queries), device=queries.device).split(QUERIES_AT_ONCE):
        some, attacks = queries.select(part), {kind: each[part] for kind, each in tokens.items()}
        for setting, values in _block(some, documents, grades[part], attacks, poolings, counts):
            for name, value in zip(values, torch.stack([*values.values()]).tolist(), strict=True):
                sums[setting][name] += value
    pairs = max(1, int((queries.to_padded()[1].sum(dim=1)[:, None] * _not_gold(grades)).sum()))
    rows = []
    for attack in ATTACKS:
        for count in counts:
            for place, pooling in enumerate(poolings):
                found = sums[attack, count, place]
                means = {name: total / (pairs if name in SHARES else len(queries)) for name, total in found.items()}
                rows.append({"attack": attack, "tokens": count, "pooling": pooling, **means})
    return rows


def _block(
    queries: TokenBatch,
    documents: TokenBatch,
    grades: Tensor,
    tokens: dict[str, Tensor],
    poolings: Sequence[Pooling],
    counts: Sequence[int],
) -> Iterator[tuple[tuple[str, int, int], dict[str, Tensor]]]:
    """Attack, number of tokens and place of the pooling, and for a few queries the sums of metrics and of both shares."""
    values, mask = queries.to_padded()
    values = values.to(sum_dtype(values.dtype))
    not_gold = _not_gold(grades)
    weightings = {TopK(1), *map(weighting_of, poolings)}
    # What is injected is the same for all documents: its states are [Q, S, 1, n].
    near = {kind: values @ injected.mT for kind, injected in tokens.items()}
    plain = values.new_zeros(len(poolings), *grades.shape)
    scores = defaultdict(lambda: values.new_zeros(grades.shape))
    shares = defaultdict(lambda: values.new_zeros(()))
    for chosen, similarities in _similarities(values, documents):
        counted = mask[:, :, None] & not_gold[:, None, chosen]
        states = {weighting: state_of(weighting, similarities) for weighting in weightings}
        for place, pooling in enumerate(poolings):
            similarity = pooled(pooling, states[weighting_of(pooling)])
            plain[place][:, chosen] = _sum(similarity, mask[:, :, None], dim=1)
        for attack, injected in near.items():
            for count in counts:
                more = {weighting: state_of(weighting, injected[:, :, None, :count]) for weighting in weightings}
                both = {weighting: joined(weighting, states[weighting], more[weighting]) for weighting in weightings}
                for weighting, (_, share) in both.items():
                    shares[attack, count, weighting] += _sum(share, counted)
                for place, pooling in enumerate(poolings):
                    similarity = pooled(pooling, both[weighting_of(pooling)][0])
                    scores[attack, count, place][:, chosen] = _sum(similarity, mask[:, :, None], dim=1)
    for (attack, count, place), all_attacked in scores.items():
        weight = shares[attack, count, weighting_of(poolings[place])]
        rankings = {attack: torch.where(not_gold, all_attacked, plain[place])}
        if attack == TARGETED:
            rankings[EVERYWHERE] = all_attacked
        for name, ranked in rankings.items():
            metrics = {metric: each.sum() for metric, each in retrieval_metrics(ranked, grades).items()}
            hijacked = shares[attack, count, TopK(1)]
            yield (name, count, place), metrics | dict(zip(SHARES, (hijacked, weight), strict=True))


def _similarities(values: Tensor, documents: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Some documents ``[G]``, and their similarities ``[Q, S, G, L]`` to queries ``[Q, S, d]``, -inf for no token."""
    rows = values.flatten(0, 1)
    by_length = documents.lengths.argsort(descending=True, stable=True)
    begin = 0
    while begin < len(by_length):
        longest = int(documents.lengths[by_length[begin]])
        chosen = by_length[begin : begin + max(1, SIMILARITIES_AT_ONCE // max(1, longest * len(rows)))]
        vectors, live = replace(documents.select(chosen), max_length=longest).to_padded()
        similarities = rows @ vectors.to(rows.dtype).flatten(0, 1).mT
        yield chosen, similarities.view(*values.shape[:2], *live.shape).masked_fill_(~live, -torch.inf)
        begin += len(chosen)


def _sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return values.masked_fill(~mask, 0).sum(dim=dim)


def _not_gold(grades: Tensor) -> Tensor:
    """Documents in the ranking of a query that are not gold for it, so neither those of NaN."""
    return grades <= 0


# Running states: of similarities ``[..., L]``, with -inf for no token, what determines their pooled values in a tensor
# ``[..., n]``, so that more tokens can join without the first ones and poolings share a pass.


def weighting_of(pooling: Pooling) -> TopK | Softmax:
    """The pooling of which this one shares the states."""
    if isinstance(pooling, Max):
        return TopK(1)
    return Softmax(pooling.temperature) if isinstance(pooling, LogSumExp) else pooling


def state_of(weighting: TopK | Softmax, similarities: Tensor) -> Tensor:
    """The state of these tokens: the k largest similarities in order, or the log of the sum of exponentials and the mean."""
    length = similarities.shape[-1]
    if isinstance(weighting, TopK):
        if weighting.k == 1 and length:
            return similarities.amax(dim=-1, keepdim=True)
        best = similarities.topk(min(weighting.k, length)).values
        return torch.nn.functional.pad(best, (0, weighting.k - best.shape[-1]), value=-torch.inf)
    lowest = torch.finfo(similarities.dtype).min  # for -inf, which is no number to subtract or to multiply by 0
    largest = similarities.amax(dim=-1, keepdim=True).clamp(min=lowest) if length else similarities.sum(-1, True)
    weights = ((similarities - largest) / weighting.temperature).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    mean = weights.mul_(similarities.clamp(min=lowest)).sum(dim=-1, keepdim=True) / total.clamp(min=1)
    return torch.cat((total.log() + largest / weighting.temperature, mean), dim=-1)


def joined(weighting: TopK | Softmax, state: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """The state of the tokens of both, to be pooled, and the share ``[...]`` of the pooling's weight on those of ``more``.

    The states broadcast against each other. The weight of a top-k pooling is 1 for each of the k winners. That of softmax
    and log-sum-exp is ``softmax(S / temperature)``. Of equal similarities those of ``more`` come last.
    """
    if isinstance(weighting, TopK):
        # The k largest of two lists in order are these, though not in order.
        more = more.flip(-1)
        best = torch.maximum(state, more)
        live = (best > -torch.inf).sum(dim=-1).clamp(min=1)
        return best, (more > state).sum(dim=-1) / live
    log_sum = torch.logaddexp(state[..., 0], more[..., 0])
    share = (more[..., 0] - log_sum).exp().masked_fill(log_sum == -torch.inf, 0)
    return torch.stack((log_sum, torch.lerp(state[..., 1], more[..., 1], share)), dim=-1), share


def pooled(pooling: Pooling, state: Tensor) -> Tensor:
    """The pooled similarity ``[...]``, 0 without a token."""
    if isinstance(pooling, (Max, TopK)):
        live = state > -torch.inf
        return state.masked_fill(~live, 0).sum(dim=-1) / live.sum(dim=-1).clamp(min=1)
    log_sum, mean = state.unbind(dim=-1)
    if isinstance(pooling, LogSumExp):
        return pooling.temperature * log_sum.masked_fill(log_sum == -torch.inf, 0)
    return mean
