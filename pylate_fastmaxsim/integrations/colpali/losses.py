"""colpali-engine's losses and its processors' scores without a similarity tensor, and ColPali without logits.

colpali-engine knows no masks: what does not count in a batch is a row of zeros. In a query it adds 0. In a document
its similarity of 0 competes, so that a page that was padded scores a query token at least 0, and one that was not may
score it lower. Here rows of zeros are not computed, and such a document starts its maxima at 0: the same scores.
Of equal maxima the first takes the whole gradient, where ``amax`` divides it among them; the gradient that a winning
row of zeros gets there, which the model multiplies by 0, is 0 here.

In the sum of exponentials of ``use_smooth_max`` rows of zeros take part, each as ``exp(0)``, in queries and documents.
There they are computed like any other row. With another pooling of ``enable()`` than the maximum they are left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps

import torch
from colpali_engine.loss import late_interaction_losses as stock_losses
from colpali_engine.models import ColPali
from colpali_engine.utils import maxsim as stock_scores
from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
from colpali_engine.utils.torch_utils import get_torch_device
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options, current_options
from pylate_fastmaxsim.integrations.patching.fallback import (
    FallbackToHost,
    Replacements,
    check,
    check_backend,
    own_documents,
)
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import LogSumExp, Max
from pylate_fastmaxsim.tokens import TokenBatch

# `ColbertLoss`, `ColbertPairwiseCELoss` and `ColbertSigmoidLoss` score through `_inbatch_scores`, which calls
# `maxsim_inbatch` without `use_smooth_max`; every processor's `score` calls `score_multi_vector`.
_replacements = Replacements("colpali-engine")
# By which losses make a score of similarities, as they came.
_AGGREGATION = {name: getattr(stock_losses.ColbertModule, name) for name in ("_aggregate", "_smooth_max")}

_OWN_POOLING = "use_smooth_max=True of a loss counts before the pooling of enable(); leave one of them out."


def patches() -> list[Patch]:
    """Replacements in colpali-engine."""
    return [*_replacements.patches(), Patch(ColPali, "forward", without_logits)]


@_replacements.of(stock_scores, "maxsim_inbatch")
def maxsim_inbatch(options: Options, query: Tensor, doc: Tensor) -> Tensor:
    check_backend("COLPALI_SCORES_BACKEND")
    _check(query, doc, 3)
    return _score(options, query, doc)


@_replacements.of(stock_scores, "maxsim_kd")
def maxsim_kd(options: Options, query: Tensor, doc: Tensor) -> Tensor:
    check_backend("COLPALI_SCORES_BACKEND")
    _check(query, doc, 4)
    if len(query) != len(doc):
        raise FallbackToHost("queries and documents differ in number")
    return _score(options, query, doc.flatten(0, 1), own_documents(doc))


@_replacements.of(stock_losses.ColbertModule, "_inbatch_scores")
def inbatch_scores(options: Options, self: nn.Module, query_embeddings: Tensor, doc_embeddings: Tensor) -> Tensor:
    if not self.use_smooth_max:
        return inbatch_scores.__wrapped__(self, query_embeddings, doc_embeddings)
    _check_loss(self)
    _check(query_embeddings, doc_embeddings, 3)
    return _scores_of_loss(options, self, query_embeddings, doc_embeddings)


def _with_negatives(
    inner: str,
    options: Options,
    self: nn.Module,
    query_embeddings: Tensor,
    doc_embeddings: Tensor,
    neg_doc_embeddings: Tensor,
    offset: int = 0,
) -> Tensor:
    """Softplus of each negative's lead over the positive, and a share of the ``inner`` loss over all documents."""
    _check_loss(self)
    _check(query_embeddings, doc_embeddings, 3)
    _check(query_embeddings, neg_doc_embeddings, 4)
    batch_size = len(query_embeddings)
    if len(neg_doc_embeddings) != batch_size or offset + batch_size > len(doc_embeddings):
        raise FallbackToHost("queries, documents and negatives differ in number")
    own = torch.arange(offset, offset + batch_size, device=query_embeddings.device)[:, None]
    negatives, own_negatives = neg_doc_embeddings.flatten(0, 1), own_documents(neg_doc_embeddings)
    positive = _scores_of_loss(options, self, query_embeddings, doc_embeddings, own)
    negative = _scores_of_loss(options, self, query_embeddings, negatives, own_negatives)
    loss = F.softplus((negative - positive) / self.temperature).mean()
    if self.in_batch_term_weight > 0:
        in_batch = getattr(self, inner)(query_embeddings, doc_embeddings, offset)
        loss = loss * (1 - self.in_batch_term_weight) + in_batch * self.in_batch_term_weight
    return loss


_replacements.of(stock_losses.ColbertNegativeCELoss, "forward")(partial(_with_negatives, "inner_loss"))
_replacements.of(stock_losses.ColbertPairwiseNegativeCELoss, "forward")(partial(_with_negatives, "inner_pairwise"))


@_replacements.of(BaseVisualRetrieverProcessor, "score_multi_vector")
def score_multi_vector(
    options: Options,
    qs: Tensor | Sequence[Tensor],
    ps: Tensor | Sequence[Tensor],
    batch_size: int = 128,
    device: str | torch.device | None = None,
) -> Tensor:
    check_backend("COLPALI_SCORES_BACKEND")
    if len(qs) == 0 or len(ps) == 0:
        raise FallbackToHost("there are no queries or no passages")
    device = device or get_torch_device("auto")
    queries = [_padded(qs[begin : begin + batch_size], device) for begin in range(0, len(qs), batch_size)]
    columns = []
    for begin in range(0, len(ps), batch_size):
        # Stock pads the pages of such a batch to the longest; the shorter ones then hold rows of zeros.
        pages = _padded(ps[begin : begin + batch_size], device)
        for some in queries:
            _check(some, pages, 3)
        columns.append(torch.cat([_score(options, some, pages) for some in queries]))
    return torch.cat([column.cpu() for column in columns], dim=1).float()


@wraps(ColPali.forward)
def without_logits(self: ColPali, *args, **kwargs) -> Tensor:
    # The embeddings come from the hidden states. Stock also computes, and throws away, the scores of all 257,216 words
    # for each of the 1,030 tokens of a page, and from the labels that the processor makes a loss in float32.
    if current_options() is not None:
        kwargs.pop("labels", None)
        kwargs["logits_to_keep"] = 1
    return without_logits.__wrapped__(self, *args, **kwargs)


def _live(embeddings: Tensor) -> tuple[TokenBatch, Tensor]:
    """The rows of ``[N, L, d]`` that are not zero, without a copy, and which sequences have one that is, ``[N]``."""
    live = (embeddings != 0).any(dim=-1)
    tokens = TokenBatch.from_padded(embeddings, live)
    if live.shape[1] > 0:
        # Zeros stand before, behind or between the rows that count.
        first = live.int().argmax(dim=1)
        tokens = replace(tokens, starts=tokens.starts + first, lengths=tokens.lengths - first)
    return tokens, ~live.all(dim=1)


def _score(options: Options, queries: Tensor, documents: Tensor, candidates: Tensor | None = None) -> Tensor:
    (queries, _), (documents, has_zeros) = _live(queries), _live(documents)
    return pooled_scores(queries, documents, candidates, pooling=options.pooling, zero_floor=has_zeros)


def _scores_of_loss(
    options: Options, loss: nn.Module, queries: Tensor, documents: Tensor, candidates: Tensor | None = None
) -> Tensor:
    if not loss.use_smooth_max:
        scores = _score(options, queries, documents, candidates)
    else:
        if not isinstance(options.pooling, Max):
            log_once(_OWN_POOLING)
        scores = pooled_scores(queries, documents, candidates, pooling=LogSumExp(loss.tau))
    # As stock counts the tokens of each query.
    return loss._apply_normalization(scores, (queries[:, :, 0] != 0).sum(dim=1)) if loss.normalize_scores else scores


def _padded(sequences: Tensor | Sequence[Tensor], device: str | torch.device) -> Tensor:
    if isinstance(sequences, Tensor):
        return sequences.to(device)
    return pad_sequence(list(sequences), batch_first=True).to(device)


def _check(queries: Tensor, documents: Tensor, documents_dim: int) -> None:
    check(queries, documents, 3, documents_dim)
    if documents.shape[-2] == 0:
        raise FallbackToHost("documents have no vectors")


def _check_loss(loss: nn.Module) -> None:
    check_backend("COLPALI_SCORES_BACKEND")
    for name, stock in _AGGREGATION.items():
        # Not getattr(loss, name).__func__, which for torch.compile is another function each time.
        if name in vars(loss) or getattr(type(loss), name) is not stock:
            raise FallbackToHost(f"its {name} is not colpali-engine's own")
    if loss.use_smooth_max and isinstance(loss.tau, Tensor):
        raise FallbackToHost("its tau is a tensor, which may be trained")
