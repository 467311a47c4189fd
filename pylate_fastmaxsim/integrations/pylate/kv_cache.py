"""Decoders without the KV cache.

Encoding never decodes further, so the cache is dead weight: each layer copies its keys and values, the copies live until
the forward ends, and each layer's own place in the cache makes ``torch.compile`` compile every layer for itself.
"""

from __future__ import annotations

from functools import wraps
from importlib import util

from sentence_transformers.models import Transformer
from torch import Tensor

from pylate_fastmaxsim.integrations.models.encoders import layers_share_keys
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached

_stock_forward = detached(Transformer.forward)


@wraps(_stock_forward)
def forward(self: Transformer, features: dict[str, Tensor], **kwargs: object) -> dict[str, Tensor]:
    asked = "use_cache" in features or "use_cache" in kwargs
    if "use_cache" in self.model_forward_params and not asked and not layers_share_keys(self):
        kwargs["use_cache"] = False
    return _stock_forward(self, features, **kwargs)


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers, which since release 6 asks for no cache itself."""
    asks_for_none = util.find_spec("sentence_transformers.multi_vector_encoder") is not None
    return [] if asks_for_none else [Patch(Transformer, "forward", forward)]
