"""The vectors that a ColBERT of PyLate gives to the tokens of its vocabulary, each of them alone in a text."""

from __future__ import annotations

import torch
from pylate.models import ColBERT
from torch import Tensor
from torch.nn import functional as F


def token_vectors(model: ColBERT, is_query: bool = False, batch_size: int = 1024) -> Tensor:
    """The normalised vector ``[V, d]`` (float32, on a CPU) of each token of the vocabulary, in a text of this token alone.

    A text has what PyLate and the tokenizer put around it, as ``[CLS] [D] token [SEP]``, but no query expansion.

    Parameters
    ----------
    model
        A model whose vectors may depend on context or not.
    is_query
        Whether a text is a query; otherwise it is a document.
    batch_size
        Texts encoded at once.
    """
    before, after = _around(model, is_query)
    vocabulary = torch.arange(model[0].auto_model.get_input_embeddings().num_embeddings)
    training = model.training
    model.eval()
    try:
        vectors = [_alone(model, tokens, before, after) for tokens in vocabulary.split(batch_size)]
    finally:
        model.train(training)
    return torch.cat(vectors)


def _around(model: ColBERT, is_query: bool) -> tuple[list[int], list[int]]:
    """The tokens before and behind those of a text."""
    encoded = model.tokenizer("a", return_special_tokens_mask=True)
    tokens, special = encoded["input_ids"], encoded["special_tokens_mask"]
    first, end = special.index(0), len(special) - special[::-1].index(0)
    prefix = model.query_prefix_id if is_query else model.document_prefix_id
    # PyLate puts its prefix behind the first token, whatever that is.
    return tokens[:first] + [prefix] * (prefix is not None and first > 0), tokens[end:]


def _alone(model: ColBERT, tokens: Tensor, before: list[int], after: list[int]) -> Tensor:
    """Vectors of tokens ``[n]``, as ``[n, d]``."""
    around = (torch.tensor(ids, dtype=torch.long).expand(len(tokens), -1) for ids in (before, after))
    left, right = around
    rows = torch.cat([left, tokens[:, None], right], dim=1).to(model.device)
    features = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    if "token_type_ids" in model.tokenizer.model_input_names:
        features["token_type_ids"] = torch.zeros_like(rows)
    with torch.no_grad():
        embeddings = model(features)["token_embeddings"][:, len(before)]
    return F.normalize(embeddings.float(), dim=-1).cpu()
