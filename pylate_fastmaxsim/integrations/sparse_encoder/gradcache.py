"""GradCache of a SparseEncoder, whose second pass encodes as the first did."""

from __future__ import annotations

from sentence_transformers.sparse_encoder import losses

from pylate_fastmaxsim.integrations.encoding.gradcache import cutting, two_passes
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached

# From release 5.3 on.
_loss = getattr(losses, "CachedSpladeLoss", None)
_embed_minibatch = None if _loss is None else two_passes(detached(_loss.embed_minibatch))


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [] if _loss is None else [Patch(_loss, "embed_minibatch", _embed_minibatch), *cutting()]
