"""Losses of a MultiVectorEncoder: queries and documents in one call of the encoder, and GradCache's two passes alike."""

from __future__ import annotations

from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorDistillKLDivLoss,
    MultiVectorMarginMSELoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from torch import nn

from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.gradcache import minibatch_patches, two_passes
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import noting_columns
from pylate_fastmaxsim.ops.score_metric import PooledScores

# 32 passages of MS MARCO have some 2,560 tokens: a step of ModernBERT-base took about as long as in stock. With 9,600
# tokens it was more than 3 times as fast. Where in between a GPU has enough to do depends on encoder and host.
_FEW_TOKENS = 4096

_FEW = (
    "Mini-batches of %s texts hold few tokens without padding, so the GPU may wait for the host. To fill them, give the "
    "loss mini_batch_num_tokens; %s times document_length is what padded ones hold."
)

_OF_OWN_DOCUMENTS = (MultiVectorDistillKLDivLoss, MultiVectorMarginMSELoss)


def _check_metric(loss: nn.Module) -> None:
    """Raise ValueError where a loss has :class:`PooledScores` that score other documents than it takes.

    A margin of scores against all documents would be broadcast, and give a loss that means nothing.
    """
    metric, own = loss.similarity_fct, isinstance(loss, _OF_OWN_DOCUMENTS)
    if isinstance(metric, PooledScores) and metric.own_documents != own:
        documents = "its own documents" if own else "all documents of the batch"
        raise ValueError(
            f"{type(loss).__name__} scores each query against {documents}, so its similarity_fct must be "
            f"PooledScores(..., own_documents={own}), got {metric}."
        )


def _recommend_tokens(loss: nn.Module, features: dict[str, object], found: list[object]) -> None:
    """Log how to fill mini-batches that keep a GPU waiting, of which stock's default of 32 texts is one."""
    packed = next((each for each in found if isinstance(each, Documents)), None)
    # Queries are short, and divided as documents are.
    if packed is None or "packed" not in found or features.get("task") == "query":
        return
    is_part = loss.mini_batch_num_tokens is None and len(packed) < len(features["input_ids"])
    if is_part and len(packed.token_index) < _FEW_TOKENS and packed.input_ids.is_cuda:
        log_once(_FEW, loss.mini_batch_size, loss.mini_batch_size, about=loss.model)


_CACHED = CachedMultiVectorMultipleNegativesRankingLoss
_PATCHES = [
    *(
        Patch(loss, "forward", noting_columns(detached(loss.forward), _check_metric))
        for loss in (MultiVectorMultipleNegativesRankingLoss, *_OF_OWN_DOCUMENTS)
    ),
    Patch(_CACHED, "embed_minibatch", two_passes(detached(_CACHED.embed_minibatch), _check_metric, _recommend_tokens)),
    *minibatch_patches(),
]


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    return _PATCHES
