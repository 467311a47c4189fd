"""Static models and token vectors of a ColBERT of PyLate: the vector of each token of its vocabulary, alone in a text."""

from typing import Any

import torch
from pylate.models import ColBERT
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

# Texts that are encoded to see whether context matters. In bfloat16 equal vectors differ by less.
_TEXTS, _TOKENS, _TOLERANCE = 8, 16, 0.02


def from_pylate(model: ColBERT, **options: Any) -> StaticLateInteraction:
    """The static model of a ColBERT whose encoder gives a token the same vector in every text.

    Scores are those of the ColBERT without what it adds to every text: special tokens, prefixes and query expansion.
    Texts are not truncated. A model that was made by ``model.token_table`` of a recipe adds nothing.

    Parameters
    ----------
    model
        An embedding table, as a recipe with ``model.token_table`` trains, or any other encoder that looks at no other
        token and at no position.
    options
        Those of :class:`~pylate_fastmaxsim.StaticLateInteraction`, such as ``threshold``. ``skiplist`` is by default that
        of the model.

    Raises
    ------
    ValueError
        The vector of a token depends on its context.

    Examples
    --------
    >>> from pylate.models import ColBERT  # doctest: +SKIP
    >>> from pylate_fastmaxsim.integrations.pylate.static import from_pylate
    >>> static = from_pylate(ColBERT("runs/static_late_interaction/model"), threshold=0.6)  # doctest: +SKIP
    >>> static.save("static")  # doctest: +SKIP
    """
    queries, documents = (token_vectors(model, is_query) for is_query in (True, False))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(queries), (_TEXTS, _TOKENS), generator=generator)
    for table, is_query in ((queries, True), (documents, False)):
        apart = (_encode_tokens(model, tokens, is_query) - table[tokens]).norm(dim=-1).max().item()
        if not apart <= _TOLERANCE:
            raise ValueError(
                "from_pylate: a token must have the same vector in every text, but vectors of a token alone and in a text "
                f"of {_TOKENS} tokens are up to {apart:.2g} apart; the encoder must be an embedding table."
            )
    same = torch.allclose(queries, documents, rtol=0, atol=1e-6)
    options = {"skiplist": {token for token in model.skiplist if token is not None}, **options}
    return StaticLateInteraction(queries, None if same else documents, plain_tokenizer(model.tokenizer), **options)


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
    return torch.cat([_encode_tokens(model, part[:, None], is_query)[:, 0] for part in vocabulary.split(batch_size)])


@torch.no_grad()
def _encode_tokens(model: ColBERT, tokens: Tensor, is_query: bool) -> Tensor:
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
    encoded = model.tokenizer("a", return_special_tokens_mask=True)
    tokens, special = encoded["input_ids"], encoded["special_tokens_mask"]
    first, end = special.index(0), len(special) - special[::-1].index(0)
    prefix = model.query_prefix_id if is_query else model.document_prefix_id
    # PyLate puts its prefix behind the first token, which without special tokens is one of the text.
    return tokens[:first] + [prefix] * (prefix is not None and first > 0), tokens[end:]


def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of a tokenizer that puts nothing around a text and has no limit of length."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.post_processor = None
    return plain
