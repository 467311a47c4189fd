"""Whether a recipe can be trained with FlashAttention 2 in stock, a third way to compare a MultiVectorEncoder with."""

from __future__ import annotations

import torch
from transformers.utils import is_flash_attn_2_available

from pylate_fastmaxsim.recipes.config.schema import Recipe

ATTENTION = "flash_attention_2"


def is_asked_for(recipe: Recipe) -> bool:
    """Whether stock may be trained with another attention: Sentence Transformers then leaves padding out itself."""
    return recipe.model.kind == "multi_vector" and recipe.model.attn_implementation is None


def why_not(recipe: Recipe) -> str | None:
    """Why stock cannot be trained with it here, in words; None if it can."""
    if not torch.cuda.is_available() or recipe.training.use_cpu:
        return "it needs a GPU"
    if not is_flash_attn_2_available():
        return "flash-attn is not installed"
    return "it needs bf16 or fp16" if recipe.training.precision == "fp32" else None
