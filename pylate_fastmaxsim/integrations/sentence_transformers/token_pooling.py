"""HierarchicalTokenPooling of Sentence Transformers on the device of the embeddings, all documents at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sentence_transformers.multi_vector_encoder.modules import BaseTokenPooling, HierarchicalTokenPooling
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, Replacements
from pylate_fastmaxsim.ops.token_pooling import pool_tokens

_replacements = Replacements("Sentence Transformers", pooled=False)
patches = _replacements.patches

_OF_ONE = HierarchicalTokenPooling.pool_one


def options_of(pooling: BaseTokenPooling) -> dict[str, Any]:
    """Those of :func:`pool_tokens`. FallbackToHost where it pools otherwise."""
    if type(pooling) is not HierarchicalTokenPooling:
        raise FallbackToHost(f"{type(pooling).__name__} is a pooling of its own")
    # Before release 6.2 means are left as they are.
    protected, normalize = pooling.num_protected_tokens, getattr(pooling, "normalize_embeddings", False)
    return {"factor": pooling.pool_factor, "protected": protected, "normalize": normalize}


@_replacements.of(HierarchicalTokenPooling, "forward", needs=(BaseTokenPooling.forward, _OF_ONE))
def forward(
    _options: Options, self: HierarchicalTokenPooling, features: dict[str, Tensor], task: str | None = None
) -> dict[str, Tensor]:
    options, tokens = options_of(self), features["token_embeddings"]
    if not self.applies_to(task) or len(tokens) == 0:
        return features
    if self.pool_factor == 1:
        if options["normalize"]:
            features["token_embeddings"] = F.normalize(tokens.to(sum_dtype(tokens.dtype)), dim=-1).to(tokens.dtype)
        return features
    pooled = pool_tokens(tokens, **options, mask=features["attention_mask"].bool())
    padded = replace(pooled, max_length=int(pooled.lengths.max())).to_padded()
    features["token_embeddings"], features["attention_mask"] = padded
    return features


@_replacements.of(HierarchicalTokenPooling, "pool", needs=(_OF_ONE,))
def pool(
    _options: Options,
    self: HierarchicalTokenPooling,
    embeddings: list[Tensor] | Tensor,
    *,
    task: str | None = None,
    attention_mask: Tensor | None = None,
    padding_side: str = "right",
) -> list[Tensor] | Tensor:
    options = options_of(self)
    if not self.applies_to(task):
        return embeddings
    if not (isinstance(embeddings, list) and embeddings and all(map(torch.is_tensor, embeddings))):
        raise FallbackToHost("its embeddings are not a list of tensors")
    if any(each.dim() != 2 or not each.is_floating_point() for each in embeddings):
        raise FallbackToHost("its embeddings are no matrices of floating-point numbers")
    pooled = pool_tokens(embeddings, **options)
    spans = zip(pooled.starts.tolist(), pooled.lengths.tolist(), strict=True)
    return [pooled.values[start : start + length] for start, length in spans]
