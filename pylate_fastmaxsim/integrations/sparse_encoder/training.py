"""Training of a SparseEncoder: token counts, all columns of a loss in one call, and GradCache's two passes alike."""

from __future__ import annotations

from sentence_transformers.sparse_encoder import SparseEncoderTrainer, losses
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator

from pylate_fastmaxsim.integrations.encoding.collated import counting_tokens_of_batches
from pylate_fastmaxsim.integrations.encoding.gradcache import minibatch_patches, two_passes
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import noting_columns

_PATCHES = [
    Patch(losses.SpladeLoss, "forward", noting_columns(detached(losses.SpladeLoss.forward))),
    *counting_tokens_of_batches(SparseEncoderDataCollator, SparseEncoderTrainer, by_rank=False),
]
if hasattr(losses, "CachedSpladeLoss"):  # from release 5.3 on
    stock = detached(losses.CachedSpladeLoss.embed_minibatch)
    _PATCHES += [Patch(losses.CachedSpladeLoss, "embed_minibatch", two_passes(stock)), *minibatch_patches()]


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    return _PATCHES
