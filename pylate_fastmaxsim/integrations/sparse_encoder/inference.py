"""``encode`` of a SparseEncoder in batches of tokens, without a tensor for each text."""

from __future__ import annotations

from contextlib import closing
from itertools import chain
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.util import select_max_active_dims
from torch import Tensor

from pylate_fastmaxsim.integrations.inference.batches import Features
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, Replacements
from pylate_fastmaxsim.integrations.sentence_transformers.texts import text_batches

# Each text has a number for every word of the vocabulary.
_MOST_TEXTS = 512


_replacements = Replacements("Sentence Transformers", pooled=False)
patches = _replacements.patches


def _inference(
    _options: Options,
    self: SparseEncoder,
    inputs: list,
    *,
    prompt: str | None,
    batch_size: int,
    show_progress_bar: bool,
    convert_to_sparse_tensor: bool,
    save_to_cpu: bool,
    max_active_dims: int | None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> Tensor:
    if not inputs:
        raise FallbackToHost("there are no texts")
    device = torch.device(self._resolve_inference_device(device))
    self.eval()
    limit = {} if max_active_dims is None else {"max_active_dims": max_active_dims}
    progress, most_texts = "Batches" if show_progress_bar else None, max(batch_size, _MOST_TEXTS)

    def embed(features: Features) -> Tensor:
        with torch.inference_mode():
            made = self(features, **limit, **kwargs)["sentence_embedding"]
            if max_active_dims is not None:
                made = select_max_active_dims(made, max_active_dims=max_active_dims)
        # Outside, as in stock: what is made inside can be converted to no other sparse layout.
        if convert_to_sparse_tensor:
            made = made.to_sparse()
        return made.cpu() if save_to_cpu else made

    options = {"prompt": prompt, **kwargs}
    with closing(text_batches(self, inputs, embed, device, batch_size, progress, most_texts, **options)) as batches:
        places, parts = zip(*batches, strict=True)
    # The text at each place of the batches goes back to its own.
    order = torch.tensor([*chain.from_iterable(places)], device=parts[0].device).argsort()
    return torch.cat(parts).index_select(0, order)


# Before release 6.2 `encode` is one function, which is left as it is.
if "_inference" in vars(SparseEncoder):
    _replacements.of(SparseEncoder, "_inference")(_inference)
