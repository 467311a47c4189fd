"""PyLate's XTR scores without a similarity tensor: the score functions, and which losses use them."""

from __future__ import annotations

from pylate.losses.distillation import Distillation
from pylate.scores import XTRKDScores, XTRScores
from pylate.utils import convert_to_tensor
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, check, own_documents
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.pylate.scores import broadcast, masked_batch, replaces
from pylate_fastmaxsim.ops.xtr import xtr_scores
from pylate_fastmaxsim.tokens import TokenBatch


def patches() -> list[Patch]:
    """Replacements in PyLate."""
    return [
        Patch(XTRScores, "__call__", score_batch),
        Patch(XTRKDScores, "__call__", score_own_documents),
    ]


def passing_tokens(loss: nn.Module) -> int | None:
    """Number of document tokens that pass for each query token of a loss with PyLate's XTR scores; None: it has others."""
    own = XTRKDScores if isinstance(loss, Distillation) else XTRScores
    metric = loss.score_metric
    return metric.k if type(metric) is own and unknown_part(own.__call__, metric) is None else None


@replaces(XTRScores.__call__, pooled=False)
def score_batch(_options: Options, *args, **kwargs) -> Tensor:
    return _score(False, *args, **kwargs)


@replaces(XTRKDScores.__call__, pooled=False)
def score_own_documents(_options: Options, *args, **kwargs) -> Tensor:
    return _score(True, *args, **kwargs)


def _score(
    own: bool, metric, queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None
) -> Tensor:
    # Asked only where the answer may be no: torch.compile cannot trace the question.
    is_plain = "_score" not in vars(metric) and type(metric)._score is XTRScores._score
    if not is_plain and (part := unknown_part(XTRScores.__call__, metric)) is not None:
        raise FallbackToHost(not_known(part))
    queries, documents = convert_to_tensor(queries_embeddings), convert_to_tensor(documents_embeddings)
    check(queries, documents, 3, 4)
    count, ways, length = documents.shape[:3]
    if own and len(queries) != count:
        raise FallbackToHost("queries and documents differ in number")
    candidates = own_documents(documents) if own else None
    zero_floor = None
    if documents_mask is not None:
        documents_mask = documents_mask.reshape(count * ways, length).bool()
        # A masked token never passes, and a token that does not pass counts as 0.
        zero_floor = ~documents_mask.all(dim=1)
    if queries_mask is not None:
        queries_mask = broadcast(queries_mask, queries)
        if queries_mask.requires_grad:
            # Which tokens pass does not depend on it in stock, where it comes after their choice.
            raise FallbackToHost("queries_mask requires a gradient")
    batch = masked_batch(queries, queries_mask)
    documents = TokenBatch.from_padded(documents.flatten(0, 1), documents_mask)
    return xtr_scores(batch, documents, metric.k, candidates, zero_floor=zero_floor).float()
