"""``encode`` of a MultiVectorEncoder without padding, and without waiting for each text."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import BaseTokenPooling
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.inference.batches import Features
from pylate_fastmaxsim.integrations.inference.rows import rows_of_texts
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, Replacements
from pylate_fastmaxsim.integrations.sentence_transformers.encoder import without_padding
from pylate_fastmaxsim.integrations.sentence_transformers.texts import text_batches
from pylate_fastmaxsim.integrations.sentence_transformers.token_pooling import options_of
from pylate_fastmaxsim.ops.token_pooling import pool_tokens
from pylate_fastmaxsim.tokens import TokenBatch

_replacements = Replacements("Sentence Transformers", pooled=False)
patches = _replacements.patches


def _inference(
    _options: Options,
    self: MultiVectorEncoder,
    inputs: list,
    *,
    prompt: str | None,
    batch_size: int,
    show_progress_bar: bool,
    output_value: str | None,
    save_to_cpu: bool,
    normalize_embeddings: bool,
    token_pooling: Any,
    task: str | None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> list[Tensor]:
    if output_value is None:
        raise FallbackToHost("the call asks for output_value=None")
    if token_pooling is not None and any(isinstance(module, BaseTokenPooling) for module in self):
        raise FallbackToHost("the call asks for token_pooling, and the model pools itself")
    is_pooled = token_pooling is not None and token_pooling.applies_to(task)
    pooling = options_of(token_pooling) if is_pooled else None
    device = torch.device(self._resolve_inference_device(device))
    self.eval()
    progress = f"Encoding {'queries' if task == 'query' else 'documents'}" if show_progress_bar else None

    def embed(features: Features) -> TokenBatch:
        with without_padding():
            # Through __call__, so that a model that was compiled as a whole runs as compiled.
            made = self(features, task=task, **kwargs)
        values, mask = made["token_embeddings"], made["attention_mask"].bool()
        values = F.normalize(values, dim=-1) if normalize_embeddings else values
        documents = TokenBatch.from_padded(values, mask)
        return documents if pooling is None else pool_tokens(documents, **pooling)

    batches = text_batches(self, inputs, embed, device, batch_size, progress, prompt=prompt, task=task, **kwargs)
    return rows_of_texts(len(inputs), batches, to_host=save_to_cpu)


# Before release 6.2 `encode` is one function, which is left as it is.
if "_inference" in vars(MultiVectorEncoder):
    _replacements.of(MultiVectorEncoder, "_inference")(_inference)
