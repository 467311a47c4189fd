"""A ColBERT of PyLate whose token vectors do not depend on context, as a static model."""

from __future__ import annotations

from typing import Any

import torch
from pylate.models import ColBERT

from pylate_fastmaxsim.integrations.pylate.token_vectors import encode_tokens, plain_tokenizer, token_vectors
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

# Texts that are encoded to see whether context matters. In bfloat16 equal vectors differ by less.
TEXTS, TOKENS, TOLERANCE = 8, 16, 0.02


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
    tokens = torch.randint(len(queries), (TEXTS, TOKENS), generator=generator)
    for table, is_query in ((queries, True), (documents, False)):
        apart = (encode_tokens(model, tokens, is_query) - table[tokens]).norm(dim=-1).max().item()
        if not apart <= TOLERANCE:
            raise ValueError(
                "from_pylate: a token must have the same vector in every text, but vectors of a token alone and in a text "
                f"of {TOKENS} tokens are up to {apart:.2g} apart; the encoder must be an embedding table."
            )
    same = torch.allclose(queries, documents, rtol=0, atol=1e-6)
    options = {"skiplist": {token for token in model.skiplist if token is not None}, **options}
    return StaticLateInteraction(queries, None if same else documents, plain_tokenizer(model.tokenizer), **options)
