"""Tables of token vectors and weights of tokens: checked, normalised, and those of other libraries' models."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pylate_fastmaxsim._checks import require_tensor


def require_tables(where: str, queries: Tensor, documents: Tensor) -> None:
    """Refuse what are not two tables ``[V, d]`` of finite numbers, of one shape and device."""
    for name, value in (("query_vectors", queries), ("document_vectors", documents)):
        require_tensor(where, name, value, "[V, d]")
        if value.dim() != 2 or len(value) == 0 or not value.is_floating_point():
            raise ValueError(
                f"{where}: {name} must be [V, d], floating point, V at least 1, got {value.dtype} of shape "
                f"{tuple(value.shape)}."
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"{where}: {name} must be finite.")
    if queries.shape != documents.shape or queries.device != documents.device:
        raise ValueError(
            f"{where}: both tables must have one shape and device, got {tuple(queries.shape)} on {queries.device} and "
            f"{tuple(documents.shape)} on {documents.device}."
        )


def scaled_documents(where: str, vectors: Tensor, normalize: bool, weights: Tensor | str | None) -> Tensor:
    """Vectors of document tokens, float32, with their weights: a tensor ``[V]``, ``"norms"`` or None."""
    if isinstance(weights, Tensor):
        factors = checked_weights(where, "document_weights", weights, vectors)
        return ((unit(vectors) if normalize else vectors.float()) * factors[:, None]).float()
    if weights not in (None, "norms"):
        raise ValueError(f'{where}: document_weights must be None, a BM25, "norms" or a tensor, got {weights!r}.')
    return unit(vectors) if normalize and weights is None else vectors.float()


def query_weights_of(where: str, vectors: Tensor, normalize: bool, weights: Tensor | str | None) -> Tensor | None:
    """Weights of query tokens ``[V]``, float64, on the CPU; None if all are 1, or if they are not known yet."""
    if isinstance(weights, Tensor):
        return checked_weights(where, "query_weights", weights, vectors).to("cpu")
    if weights == "norms":
        if not normalize:
            raise ValueError(f'{where}: query_weights="norms" needs normalize=True; otherwise vectors keep norms.')
        return vectors.double().norm(dim=1).to("cpu")
    if weights not in (None, "idf"):
        raise ValueError(f'{where}: query_weights must be None, "idf", "norms" or a tensor, got {weights!r}.')
    return None


def checked_weights(where: str, name: str, weights: Tensor, vectors: Tensor) -> Tensor:
    """A weight for each of the vectors, float64, on their device."""
    weights, size = weights.detach().to(vectors.device).double(), len(vectors)
    if weights.shape != (size,) or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(
            f"{where}: {name} must be [V] with V = {size}, finite and at least 0, got shape "
            f"{tuple(weights.shape)}{'' if weights.shape != (size,) else ' with other numbers'}."
        )
    return weights


def token_list(where: str, name: str, tokens: Iterable[int], vocabulary: int) -> list[int]:
    """Token ids, each once, ascending."""
    tokens = sorted({*tokens})
    if tokens and (tokens[0] < 0 or tokens[-1] >= vocabulary):
        raise ValueError(f"{where}: {name} must be token ids from 0 to {vocabulary - 1}, got {tokens}.")
    return tokens


def unit(vectors: Tensor) -> Tensor:
    """Divided by their norms; a vector of zeros stays one."""
    norms = vectors.double().norm(dim=1, keepdim=True)
    return (vectors / norms.masked_fill(norms == 0, 1)).float()


def of_static_embedding(where: str, module: object) -> tuple[Tensor, Tensor | None, Callable]:
    """Vectors of query and of document tokens (None: the same) and the tokenizer of a ``StaticEmbedding``.

    Also of a SentenceTransformer that begins with one, or with a Router that has one for each side.
    """
    first, *others = module if isinstance(module, nn.Sequential) and len(module) else [module]
    routes = getattr(first, "sub_modules", {})
    if {*routes} == {"query", "document"}:
        (queries, *left), (documents, *right) = routes["query"], routes["document"]
        others = [*others, *left, *right]
    else:
        queries = documents = first
    sides = [queries, documents]
    if not all(isinstance(getattr(side, "embedding", None), nn.EmbeddingBag) for side in sides):
        raise TypeError(
            f"{where}: module must be a StaticEmbedding or a SentenceTransformer that begins with one, or with a Router of "
            f"one for queries and one for documents, got {type(module).__name__}."
        )
    # Means are normalised, which MaxSim has none of.
    other = next((each for each in others if type(each).__name__ != "Normalize"), None)
    if other is not None:
        raise TypeError(f"{where}: behind a StaticEmbedding only Normalize may stand, got {type(other).__name__}.")
    if queries is documents:
        return queries.embedding.weight, None, queries.tokenizer
    if queries.tokenizer.to_str() != documents.tokenizer.to_str():
        raise ValueError(f"{where}: queries and documents must have the same tokenizer.")
    return queries.embedding.weight, documents.embedding.weight, queries.tokenizer


def of_model2vec(model: object) -> tuple[Tensor, list[int]]:
    """Vectors of tokens, float32, and the unknown token, of a ``StaticModel`` of model2vec."""
    vectors = torch.as_tensor(model.embedding).float()
    if getattr(model, "token_mapping", None) is not None:
        vectors = vectors[torch.as_tensor(model.token_mapping).long()]
    if getattr(model, "weights", None) is not None:
        vectors = vectors * torch.as_tensor(model.weights).float()[:, None]
    return vectors, [] if model.unk_token_id is None else [model.unk_token_id]
