"""Decoders without the keys and values that transformers keeps of every layer, for a text that goes on.

Nobody goes on with a text that is encoded. To keep them copies them in each layer, holds the copies until the model has
answered, and gives each layer a place of its own among them, so that ``torch.compile`` compiles each layer for itself.
"""

from __future__ import annotations

from importlib import util

from sentence_transformers.models import Transformer
from torch import Tensor

from pylate_fastmaxsim.integrations.models.encoders import layers_share_keys
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached

_stock_forward = detached(Transformer.forward)


def forward(self: Transformer, features: dict[str, Tensor], **kwargs: object) -> dict[str, Tensor]:
    asked = "use_cache" in features or "use_cache" in kwargs
    if "use_cache" in self.model_forward_params and not asked and not layers_share_keys(self):
        kwargs["use_cache"] = False
    return _stock_forward(self, features, **kwargs)


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers, which since release 6 asks for no cache itself."""
    asks_for_none = util.find_spec("sentence_transformers.multi_vector_encoder") is not None
    return [] if asks_for_none else [Patch(Transformer, "forward", forward)]
