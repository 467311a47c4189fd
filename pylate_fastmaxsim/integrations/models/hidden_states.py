"""The encoder inside a model of transformers that goes on with a head, called as models of embeddings are."""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.encoders import encoder_of

_made: WeakKeyDictionary[nn.Module, HiddenStates] = WeakKeyDictionary()


class HiddenStates(nn.Module):
    """Hidden states in the place of what the head makes of them: for a masked language model, of logits.

    It shares the modules of the encoder, and stands in for a Transformer of Sentence Transformers.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.auto_model = encoder
        self.model_forward_params = set(inspect.signature(encoder.forward).parameters)
        self.tokenizer = None

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {key: value for key, value in features.items() if key in self.model_forward_params}
        return {"token_embeddings": self.auto_model(**given, return_dict=True).last_hidden_state}


def hidden_states_of(transformer: nn.Module) -> HiddenStates:
    """The same for a Transformer of Sentence Transformers, always with its tokenizer and mode."""
    encoder = encoder_of(transformer).base_model
    found = _made.get(transformer)
    if found is None or found.auto_model is not encoder:
        found = _made[transformer] = HiddenStates(encoder)
    found.training, found.tokenizer = transformer.training, transformer.tokenizer
    return found
