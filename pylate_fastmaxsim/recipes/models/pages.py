"""A model of pages with the processor that makes its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
    from peft import PeftModel
    from PIL.Image import Image


@dataclass
class PageModel:
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
