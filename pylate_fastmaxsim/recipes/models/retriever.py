"""The kinds of model that retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import sentence_transformers
import torch
from sentence_transformers import SparseEncoder
from torch import Tensor
from transformers import PreTrainedModel

from pylate_fastmaxsim.recipes.errors import RecipeError

if TYPE_CHECKING:
    from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
    from peft import PeftModel
    from PIL.Image import Image
    from pylate.models import ColBERT
    from sentence_transformers import MultiVectorEncoder

    from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction


@dataclass
class VisualRetriever:
    """A model of colpali-engine, with adapters or without, and the processor that makes its inputs."""

    model: PreTrainedModel | PeftModel
    processor: BaseVisualRetrieverProcessor

    @torch.no_grad()
    def encode(self, items: Sequence[str] | Sequence[Image], batch_size: int, is_query: bool) -> list[Tensor]:
        """The token vectors ``[L, d]`` of each query (a text) or page (an image), on the device of the model."""
        self.model.eval()
        process = self.processor.process_queries if is_query else self.processor.process_images
        found: list[Tensor] = []
        for begin in range(0, len(items), batch_size):
            batch = process(list(items[begin : begin + batch_size])).to(self.model.device)
            # Padding is rows of zeros.
            found += [row[row.any(dim=1)] for row in self.model(**batch)]
        return found

    def save_pretrained(self, directory: str) -> None:
        """Save both, so that ``from_pretrained`` of colpali-engine's classes loads them."""
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)


# What a recipe trains. As text, because not every library is installed.
Retriever: TypeAlias = "ColBERT | SparseEncoder | VisualRetriever"
# What encodes texts: late interaction, learned-sparse, or static. In a search also a VisualRetriever.
TextRetriever: TypeAlias = "ColBERT | MultiVectorEncoder | SparseEncoder | StaticLateInteraction"


def encoder_of(model: ColBERT | SparseEncoder) -> PreTrainedModel:
    """The model of transformers in a text encoder, also below the route of a Router."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def is_multi_vector(model: object) -> bool:
    """Whether a model is a MultiVectorEncoder, which Sentence Transformers has from release 6 on."""
    kind = getattr(sentence_transformers, "MultiVectorEncoder", None)
    return kind is not None and isinstance(model, kind)


def require_inner_product(model: SparseEncoder, key: str, name: str) -> None:
    """Refuse a model with another similarity, which exact sparse search has not."""
    if model.similarity_fn_name != "dot":
        raise RecipeError(
            f"{key} {name} must score by the inner product (dot), but its similarity is {model.similarity_fn_name}."
        )
