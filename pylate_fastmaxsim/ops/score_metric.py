"""``PooledScores``: scores with any pooling, for losses that take a function of padded embeddings."""

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.ops.pooled import live_counts, pooled_scores
from pylate_fastmaxsim.pooling import Max, Pooling, check_pooling
from pylate_fastmaxsim.tokens import TokenBatch, as_batch

Embeddings = Tensor | np.ndarray | list


@dataclass(eq=False)
class PooledScores:
    """:func:`~pylate_fastmaxsim.pooled_scores` as the ``score_metric`` of a loss of PyLate.

    Also the ``similarity_fct`` of a loss of Sentence Transformers' MultiVectorEncoder. It scores with and without
    :func:`~pylate_fastmaxsim.enable`. With it on, the batches of such a loss are encoded without padding as well, and
    this pooling is used whatever ``enable(pooling=...)`` says. A masked token is left out, also with ``stock_masking``,
    and so is one whose vector is zero, with which evaluators pad: training and evaluation pool the same tokens.

    Parameters
    ----------
    pooling
        How a query token pools its similarities to a document's tokens. It may be changed while training, and is read in
        each call.
    length_normalize
        Divide the scores of a query by the number of its live tokens: MeanMaxSim with ``Max()``.
    own_documents
        Score each query against its own documents, as distillation and pairwise losses need it, in place of all
        documents, as contrastive losses do.

    Raises
    ------
    TypeError
        ``pooling`` is not one.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import PooledScores, TopK
    >>> metric = PooledScores(TopK(2), length_normalize=True)
    >>> metric
    PooledScores(pooling=TopK(k=2), length_normalize=True, own_documents=False)
    >>> metric(torch.ones(3, 4, 8), torch.ones(3, 2, 5, 8)).shape
    torch.Size([3, 6])
    >>> PooledScores(own_documents=True)(torch.ones(3, 4, 8), torch.ones(3, 2, 5, 8)).shape
    torch.Size([3, 2])

    A loss is then ``losses.Contrastive(model, score_metric=metric)``.
    """

    pooling: Pooling = Max()
    _: KW_ONLY
    length_normalize: bool = False
    own_documents: bool = False

    def __post_init__(self) -> None:
        check_pooling("PooledScores", self.pooling)

    def __call__(
        self,
        queries_embeddings: Embeddings,
        documents_embeddings: Embeddings,
        queries_mask: Tensor | None = None,
        documents_mask: Tensor | None = None,
    ) -> Tensor:
        """Score padded embeddings; masks are bool or 0/1.

        Parameters
        ----------
        queries_embeddings
            ``[Nq, Lq, d]``, or a list of matrices ``[L, d]``.
        documents_embeddings
            One document for each place in the batch, ``[Nd, Ld, d]`` or a list of matrices, or N, ``[Nd, N, Ld, d]``.
        queries_mask
            Query tokens that count if they are not zero, ``[Nq, Lq]``. ``None``: all.
        documents_mask
            Document tokens, ``[Nd, Ld]`` or ``[Nd, N, Ld]``, likewise.

        Returns
        -------
        Tensor
            ``[Nq, Nd]`` or ``[Nq, Nd * N]``, the documents of the first place first. With ``own_documents`` ``[Nq]`` or
            ``[Nq, N]``. float32, or float64 for float64 embeddings.

        Raises
        ------
        ValueError
            As :func:`~pylate_fastmaxsim.pooled_scores`; with ``own_documents`` also if Nq is not Nd.
        TypeError
            As :func:`~pylate_fastmaxsim.pooled_scores`.
        """
        in_groups, ways = getattr(documents_embeddings, "ndim", 3) == 4, 1
        if in_groups:
            ways = documents_embeddings.shape[1]
            documents_embeddings = torch.as_tensor(documents_embeddings).flatten(0, 1)
            documents_mask = None if documents_mask is None else torch.as_tensor(documents_mask).flatten(0, 1)
        queries = _tokens("queries", queries_embeddings, queries_mask)
        documents = _tokens("documents", documents_embeddings, documents_mask)
        candidates = None
        if self.own_documents:
            if len(queries) * ways != len(documents):
                raise ValueError(
                    f"PooledScores: with own_documents=True there must be as many queries as documents or groups of "
                    f"documents, got {len(queries)} and {len(documents) // ways}; a contrastive loss takes own_documents=False."
                )
            candidates = torch.arange(len(documents), device=queries.device).view(-1, ways)
        scores = self.of_batches(queries, documents, candidates)
        return scores if in_groups or not self.own_documents else scores.squeeze(1)

    def of_batches(
        self,
        queries: TokenBatch,
        documents: TokenBatch,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """Scores ``[Nq, Nd]``, or ``[Nq, K]`` of candidates; arguments as of :func:`~pylate_fastmaxsim.pooled_scores`."""
        queries, documents = _without_zeros(queries), _without_zeros(documents)
        scores = pooled_scores(queries, documents, candidates, pooling=self.pooling)
        if not self.length_normalize:
            return scores
        return scores / live_counts(queries.starts, queries.lengths, queries.keep).clamp(min=1)[:, None]

    def get_config_dict(self) -> dict[str, object]:
        """The settings, which Sentence Transformers writes in a model card."""
        return {name: getattr(self, name) for name in ("pooling", "length_normalize", "own_documents")}


def _without_zeros(batch: TokenBatch) -> TokenBatch:
    """A batch whose rows of zeros do not count.

    A similarity of 0 to padding seldom is the largest, but it always is one of those that other poolings average.
    """
    not_zero = (batch.values != 0).any(dim=1)
    return replace(batch, keep=not_zero if batch.keep is None else batch.keep & not_zero)


def _tokens(name: str, embeddings: Embeddings, mask: Tensor | None) -> TokenBatch:
    """Padded embeddings ``[N, L, d]``, or matrices in a list; ``name`` is theirs in errors."""
    if getattr(embeddings, "ndim", 3) == 2:
        embeddings = [embeddings]  # of one text, as Sentence Transformers' reranking evaluator has it
    if isinstance(embeddings, np.ndarray) and embeddings.dtype == object:
        embeddings = [*embeddings]
    mask = None if mask is None else torch.as_tensor(mask)
    return as_batch("PooledScores", name, embeddings, mask)
