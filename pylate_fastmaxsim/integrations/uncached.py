"""Decoders without the keys and values that transformers keeps of every layer, for a text that goes on.

Nobody goes on with a text that is encoded. To keep them copies them in each layer, holds the copies until the model has
answered, and gives each layer a place of its own among them, so that ``torch.compile`` compiles each layer for itself.
"""

from __future__ import annotations

from sentence_transformers.models import Transformer
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached

_stock_forward = detached(Transformer.forward)


def forward(self: Transformer, features: dict[str, Tensor], **kwargs: object) -> dict[str, Tensor]:
    asked = "use_cache" in features or "use_cache" in kwargs
    if "use_cache" in self.model_forward_params and not asked and not layers_share_keys(self):
        kwargs["use_cache"] = False
    return _stock_forward(self, features, **kwargs)


def layers_share_keys(transformer: nn.Module) -> bool:
    """Whether layers find the keys and values of others in what is kept, as those of Gemma 3n do."""
    config = getattr(getattr(transformer, "auto_model", None), "config", None)
    if hasattr(config, "get_text_config"):  # not in transformers before 4.46, nor such layers
        config = config.get_text_config()
    return bool(getattr(config, "num_kv_shared_layers", 0))


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(Transformer, "forward", forward)]
