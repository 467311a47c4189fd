"""An index of PLAID in place of encoded documents, and what its own search finds of the best of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.evaluation.beir import Collection
from pylate_fastmaxsim.retrieval.plaid.files import FAST_PLAID, plaid_folder
from pylate_fastmaxsim.retrieval.plaid.read import PlaidCorpus, read_plaid
from pylate_fastmaxsim.tokens import TokenBatch

# Of the first so many of the exhaustive ranking it is said how many the index's own search finds.
DEPTHS = (10, 100)
# Those of PyLate's index; it probes as many clusters as fast-plaid does by itself.
FULL_SCORES = 8192


def open_index(folder: Path) -> PlaidCorpus:
    """The index in a folder, mapped into memory. RecipeError if it cannot be used."""
    try:
        return read_plaid(folder)
    except (ValueError, OSError) as error:
        raise RecipeError(f"--plaid: {first_line(error)}") from error


def in_order_of(index: PlaidCorpus, collection: Collection, folder: Path) -> Collection:
    """The collection with the documents of the index, in its order.

    Without ids, the index must hold all documents in the order of the collection.

    Raises
    ------
    RecipeError
        A document of the index is not in the collection, or in the index twice.
    """
    corpus = collection.corpus
    if index.ids is None:
        if len(index) != len(corpus):
            raise RecipeError(
                f"--plaid: {folder} has no ids, so it must hold the {len(corpus)} documents of the corpus in their order, but "
                f"holds {len(index)}."
            )
        return collection
    rows = {str(name): row for row, name in enumerate(corpus["_id"][:])}
    names = list(map(str, index.ids))
    if (strange := next((name for name in names if name not in rows), None)) is not None:
        raise RecipeError(f"--plaid: {folder} holds the document {strange}, which is not in the corpus.")
    if (repeated := next((name for name, count in Counter(names).items() if count > 1), None)) is not None:
        raise RecipeError(f"--plaid: {folder} must hold each document once, but {repeated} is there twice.")
    return replace(collection, corpus=corpus.select([rows[name] for name in names]))


def require_same_dim(index: PlaidCorpus, queries: TokenBatch) -> None:
    """Refuse an index of the embeddings of another model, as far as their d tells."""
    if index.dim != queries.dim:
        raise RecipeError(
            f"--plaid: {index.folder} holds embeddings of d = {index.dim}, but MODEL makes embeddings of d = {queries.dim}."
        )


def own_search(folder: Path, queries: TokenBatch, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scores and positions ``[Nq, K]`` of what the index's own search finds, best first; -1 where it finds no more.

    Raises
    ------
    RecipeError
        The index is not one of fast-plaid, or fast-plaid cannot search it.
    """
    folder = plaid_folder(folder)
    if not (folder / FAST_PLAID.centroids_file).exists():
        raise RecipeError("it is not an index of fast-plaid")
    # Whose module brings the release that PyLate works with.
    from pylate.indexes.fast_plaid import search as fast_plaid

    padded, _ = queries.to_padded()
    try:
        with fast_plaid.FastPlaid(str(folder), device=str(device), low_memory=False) as plaid:
            found = plaid.search(padded, top_k=k, n_full_scores=FULL_SCORES, show_progress=False)
    except Exception as error:  # of fast-plaid, which is in Rust
        raise RecipeError(f"fast-plaid cannot search it: {first_line(error)}") from error
    scores = [torch.tensor([score for _, score in row], dtype=torch.float32) for row in found]
    positions = [torch.tensor([position for position, _ in row], dtype=torch.int64) for row in found]
    return pad_sequence(scores, batch_first=True), pad_sequence(positions, batch_first=True, padding_value=-1)


def overlap(positions: Tensor, own: Tensor, documents: int) -> dict[str, float]:
    """Of the first documents of each exhaustive ranking the share that is among as many first of the index's own search."""
    shares = {}
    for depth in DEPTHS:
        first = positions[:, :depth].cpu()
        if depth <= min(documents, first.shape[1]):
            found = (first[:, :, None] == own[:, None, :depth]).any(dim=2)
            shares[f"overlap@{depth}"] = float(found.double().mean())
    return shares
