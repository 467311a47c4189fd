"""The vectors that a ColBERT of PyLate gives to the tokens of its vocabulary, each of them alone in a text."""

from __future__ import annotations

import torch
from pylate.models import ColBERT
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase


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
    vocabulary = torch.arange(model[0].auto_model.get_input_embeddings().num_embeddings)
    return torch.cat([encode_tokens(model, part[:, None], is_query)[:, 0] for part in vocabulary.split(batch_size)])


@torch.no_grad()
def encode_tokens(model: ColBERT, tokens: Tensor, is_query: bool) -> Tensor:
    """The normalised vectors of texts of equal length, by the ids ``[N, L]`` of their own tokens, as ``[N, L, d]``."""
    before, after = (torch.tensor(ids, dtype=torch.long).expand(len(tokens), -1) for ids in _around(model, is_query))
    rows = torch.cat([before, tokens, after], dim=1).to(model.device)
    features = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    if "token_type_ids" in model.tokenizer.model_input_names:
        features["token_type_ids"] = torch.zeros_like(rows)
    training = model.training
    model.eval()
    try:
        embeddings = model(features)["token_embeddings"]
    finally:
        model.train(training)
    own = embeddings[:, before.shape[1] : before.shape[1] + tokens.shape[1]]
    return F.normalize(own.float(), dim=-1).cpu()


def _around(model: ColBERT, is_query: bool) -> tuple[list[int], list[int]]:
    """The tokens before and behind those of a text."""
    encoded = model.tokenizer("a", return_special_tokens_mask=True)
    tokens, special = encoded["input_ids"], encoded["special_tokens_mask"]
    first, end = special.index(0), len(special) - special[::-1].index(0)
    prefix = model.query_prefix_id if is_query else model.document_prefix_id
    # PyLate puts its prefix behind the first token, which without special tokens is one of the text.
    return tokens[:first] + [prefix] * (prefix is not None and first > 0), tokens[end:]


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The same tokenizer without what it puts around a text, and without limits of length."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.post_processor = None
    return plain
