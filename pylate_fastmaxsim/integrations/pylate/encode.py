"""PyLate's ``ColBERT.encode`` without padding, and without waiting for each text."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from pylate.models import ColBERT
from pylate.models import colbert as stock_module
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from pylate_fastmaxsim.integrations.encoding.encode import plan_documents, query_row
from pylate_fastmaxsim.integrations.encoding.plans import token_embeddings
from pylate_fastmaxsim.integrations.inference.batches import Features, embedded_batches
from pylate_fastmaxsim.integrations.inference.rows import rows_of_texts
from pylate_fastmaxsim.integrations.inference.tokenizing import faster
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost, Replacements
from pylate_fastmaxsim.ops.token_pooling import pool_tokens
from pylate_fastmaxsim.tokens import TokenBatch

_replacements = Replacements("PyLate", pooled=False)
patches = _replacements.patches


@_replacements.of(ColBERT, "encode")
def encode(
    _options: Options,
    self: ColBERT,
    sentences: Any,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    show_progress_bar: bool | None = None,
    precision: str = "float32",
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    padding: bool = False,
    device: str | None = None,
    normalize_embeddings: bool = True,
    is_query: bool = True,
    pool_factor: int = 1,
    protected_tokens: int = 1,
    output_value: str | None = "token_embeddings",
) -> Any:
    given = dict(locals())
    if output_value != "token_embeddings":
        raise FallbackToHost(f"the call asks for output_value={output_value}")
    if precision != "float32":
        raise FallbackToHost(f"the call asks for precision={precision!r}")
    if self.device.type == "hpu" or group_in_step(self) is not None:
        raise FallbackToHost("the model is not on one GPU or CPU")
    if isinstance(sentences, list) and sentences and isinstance(sentences[0], list):
        options = {key: given[key] for key in given.keys() - {"_options", "self", "sentences", "output_value"}}
        made = [self.encode(texts, **options) for texts in sentences]
        return [torch.stack(each) for each in made] if convert_to_tensor else made
    single = isinstance(sentences, str) or not hasattr(sentences, "__len__")
    texts = [sentences] if single else list(sentences)
    if not texts:
        return []
    if (prompt := _prompt(self, prompt, prompt_name)) is not None:
        texts = [prompt + text for text in texts]
    self.eval()
    self.to(device := torch.device(device or self.device))
    if show_progress_bar is None:
        show_progress_bar = stock_module.logger.getEffectiveLevel() in (logging.INFO, logging.DEBUG)

    as_arrays = convert_to_numpy and not convert_to_tensor
    is_pooled = pool_factor > 1 and not is_query
    # Only vectors of length 1 have cosine distances.
    pooling = getattr(self.pool_embeddings_hierarchical, "__func__", None)
    pools_as_stock = pooling is ColBERT.pool_embeddings_hierarchical and protected_tokens >= 0
    in_batches = is_pooled and normalize_embeddings and pools_as_stock
    to_host = as_arrays or in_batches  # where PyLate leaves what it pools
    pooled = (pool_factor, protected_tokens) if in_batches else None
    batches = embedded_batches(
        texts,
        faster(self, functools.partial(type(self).tokenize, is_query=is_query), texts),
        lambda features: _embed(self, features, is_query, normalize_embeddings, widen=as_arrays, pooled=pooled),
        text_length=self._text_length,
        device=device,
        batch_size=batch_size,
        longest=max(self.query_length, self.document_length),
        fixed_width=is_query,
        progress=f"Encoding {'queries' if is_query else 'documents'}" if show_progress_bar else None,
    )
    found = rows_of_texts(len(texts), batches, to_host=to_host)
    if is_pooled and not in_batches:
        found = self.pool_embeddings_hierarchical(
            documents_embeddings=found, pool_factor=pool_factor, protected_tokens=protected_tokens
        )
    if padding:
        found = list(pad_sequence(found, batch_first=True).split(1))
    if as_arrays:
        found = [each.numpy() for each in found]
    return found[0] if single else found


def _prompt(model: ColBERT, prompt: str | None, name: str | None) -> str | None:
    if prompt is not None:
        if name is not None:
            stock_module.logger.warning("prompt_name is ignored, because a prompt is given.")
        return prompt
    if name is not None and name not in model.prompts:
        raise ValueError(
            f"Prompt name '{name}' not found in the configured prompts dictionary. "
            f"Available keys are: {list(model.prompts)!r}."
        )
    return model.prompts.get(model.default_prompt_name if name is None else name)


def _embed(
    model: ColBERT, features: Features, is_query: bool, normalize: bool, widen: bool, pooled: tuple[float, int] | None
) -> TokenBatch:
    if is_query:
        mask = features["attention_mask"]
        values = token_embeddings(model, query_row(model, features)).reshape(*mask.shape, -1)
        # Expansion scores masked tokens too.
        made = TokenBatch.from_padded(values, None if model.do_query_expansion else mask.bool())
    else:
        plan = plan_documents(model, [features], model.skiplist, groups=False)
        made = plan.batch([token_embeddings(model, call) for call in plan.calls])
    if normalize:
        made = made.with_values(F.normalize(made.values, dim=1))
    if pooled is not None:
        factor, protected = pooled
        made = pool_tokens(made, factor, protected=protected, normalize=False)
    # NumPy has no bfloat16.
    return made.with_values(made.values.float()) if widen and made.values.dtype == torch.bfloat16 else made
