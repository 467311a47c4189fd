"""``encode``: the token embeddings of a batch, for a loss of one's own."""

import sys
from collections.abc import Iterable
from types import ModuleType

from torch import nn

from pylate_fastmaxsim.integrations.models.wrappers import StandIn, unwrap
from pylate_fastmaxsim.losses.columns import Features, texts_in
from pylate_fastmaxsim.tokens import TokenBatch


def encode(model: nn.Module, features: Iterable[Features]) -> tuple[TokenBatch, TokenBatch]:
    """Encode the columns of a batch as the losses of a model's library do: differentiable, of unit length.

    With :func:`~pylate_fastmaxsim.enable` texts are encoded without padding as in those losses, queries and documents in
    one call where that works. Without it they are padded. The values are the same.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT`` or a ``MultiVectorEncoder`` of Sentence Transformers, possibly wrapped: the ``model``
        of a loss.
    features
        The tokenized columns that a trainer hands to a loss: Nq queries, and one or more columns of documents, each of
        Nq texts or of a multiple.

    Returns
    -------
    queries
        Nq queries, and of each the tokens that are scored: all with query expansion.
    documents
        First all documents of the first query, in the order of the columns, then those of the second, and so on: with N
        documents a query those of query i are ``i * N`` to ``i * N + N - 1``. Masked tokens and those of a skiplist are
        left out.

    Raises
    ------
    ValueError
        There is no column of documents, or one has not a multiple of Nq texts. With a ColBERT also: the model changes
        ids or masks, as learned pruning does.
    TypeError
        The model is of another kind.

    Examples
    --------
    A contrastive loss by hand, of the first document of each query against all of the batch::

        queries, documents = pylate_fastmaxsim.encode(self.model, sentence_features)
        scores = pylate_fastmaxsim.maxsim(queries, documents)
        positives = torch.arange(len(queries), device=scores.device) * (len(documents) // len(queries))
        return torch.nn.functional.cross_entropy(scores, positives)
    """
    columns = list(features)
    counts = [texts_in(column) for column in columns]
    if len(columns) < 2 or any(count == 0 or count % counts[0] for count in counts):
        raise ValueError(
            "encode: features must be a column of queries and columns of documents, each of as many texts as there are "
            f"queries or a multiple of it, got columns of {', '.join(map(str, counts)) or 'nothing'}."
        )
    queries, mask, documents, _ = host_of("encode", model).encoded(model, columns)
    return TokenBatch.from_padded(queries, mask), documents


def host_of(where: str, model: nn.Module) -> ModuleType:
    """The module that encodes for losses with the models of a library. TypeError, for ``where``, if it knows none."""
    core = unwrap(model)
    while isinstance(core, StandIn):  # of one Matryoshka inside of another
        core = unwrap(core)
    # A model is of a library that was imported.
    if isinstance(core, getattr(sys.modules.get("pylate.models"), "ColBERT", ())):
        from pylate_fastmaxsim.losses import pylate as host
    elif isinstance(core, getattr(sys.modules.get("sentence_transformers"), "MultiVectorEncoder", ())):
        from pylate_fastmaxsim.losses import multi_vector as host
    else:
        raise TypeError(
            f"{where}: model must be a ColBERT of PyLate or a MultiVectorEncoder of Sentence Transformers, got "
            f"{type(core).__name__}."
        )
    return host
