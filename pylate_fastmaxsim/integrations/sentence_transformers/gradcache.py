"""GradCache of a MultiVectorEncoder, whose second pass encodes as the first did."""

from __future__ import annotations

from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.gradcache import cutting, two_passes
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers.losses import check_metric

# 32 passages of MS MARCO have some 2,560 tokens: a step of ModernBERT-base took about as long as in stock. With 9,600
# tokens it was more than 3 times as fast. Where in between a GPU has enough to do depends on encoder and host.
_FEW_TOKENS = 4096

_FEW = (
    "Mini-batches of %s texts hold few tokens without padding, so the GPU may wait for the host. To fill them, give the "
    "loss mini_batch_num_tokens; %s times document_length is what padded ones hold."
)


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        Patch(CachedMultiVectorMultipleNegativesRankingLoss, "embed_minibatch", embed_minibatch),
        *cutting(),
    ]


def _advise(loss: nn.Module, features: dict[str, object], found: list[object]) -> None:
    """Say how to fill mini-batches that keep a GPU waiting, of which stock's default of 32 texts is one."""
    packed = next((each for each in found if isinstance(each, Documents)), None)
    # Queries are short, and divided as documents are.
    if packed is None or "packed" not in found or features.get("task") == "query":
        return
    is_part = loss.mini_batch_num_tokens is None and len(packed) < len(features["input_ids"])
    if is_part and len(packed.token_index) < _FEW_TOKENS and _on_gpu(packed.input_ids):
        log_once(_FEW, loss.mini_batch_size, loss.mini_batch_size, about=loss.model)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


embed_minibatch = two_passes(
    detached(CachedMultiVectorMultipleNegativesRankingLoss.embed_minibatch),
    check_metric,
    _advise,
)
