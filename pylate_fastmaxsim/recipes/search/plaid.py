"""An index of PLAID in place of encoded documents, and what its own search finds of the best of them."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pylate_fastmaxsim.recipes.data.collection import Collection
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.retrieval.plaid import FAST_PLAID, PlaidCorpus, plaid_folder, read_plaid, read_sizes
from pylate_fastmaxsim.tokens import TokenBatch

# Of the first so many of the exhaustive ranking it is said how many the index's own search finds.
DEPTHS = (10, 100)
# Those of PyLate's index; it probes as many clusters as fast-plaid does by itself.
FULL_SCORES = 8192


@dataclass(frozen=True)
class PlaidIndex:
    """An index of PLAID, by the folder that the user names."""

    folder: Path
    corpus: PlaidCorpus

    def reorder(self, collection: Collection) -> Collection:
        """The collection with the documents of the index, in its order.

        Without ids, the index must hold all documents in the order of the collection.
        """
        corpus = collection.corpus
        if self.corpus.ids is None:
            if len(self.corpus) != len(corpus):
                raise RecipeError(
                    f"--plaid: {self.folder} has no ids, so it must hold the {len(corpus)} documents of the corpus in their "
                    f"order, but holds {len(self.corpus)}."
                )
            return collection
        rows = {str(name): row for row, name in enumerate(corpus["_id"][:])}
        names = list(map(str, self.corpus.ids))
        if (strange := next((name for name in names if name not in rows), None)) is not None:
            raise RecipeError(f"--plaid: {self.folder} holds the document {strange}, which is not in the corpus.")
        if (repeated := next((name for name, count in Counter(names).items() if count > 1), None)) is not None:
            raise RecipeError(f"--plaid: {self.folder} must hold each document once, but {repeated} is there twice.")
        return replace(collection, corpus=corpus.select([rows[name] for name in names]))

    def documents_for(self, queries: TokenBatch) -> PlaidCorpus:
        """The documents of the index; queries of another d are refused."""
        if self.corpus.dim != queries.dim:
            raise RecipeError(
                f"--plaid: {self.folder} holds embeddings of d = {self.corpus.dim}, but MODEL makes embeddings of d = "
                f"{queries.dim}."
            )
        return self.corpus

    def pruned_search(
        self, queries: TokenBatch, k: int, searching: Callable[[], AbstractContextManager]
    ) -> tuple[Tensor, Tensor]:
        """Scores and positions ``[Nq, K]`` of what PLAID finds, best first; a position of -1 where it finds no more.

        The search runs within ``searching()``, the loading of the index before.
        """
        folder = plaid_folder(self.folder)
        if not (folder / f"centroids.{FAST_PLAID}").exists():
            raise RecipeError("it is not an index of fast-plaid")
        # Whose module brings the release that PyLate works with.
        from pylate.indexes.fast_plaid import search as fast_plaid

        *_, merged = read_sizes(folder, FAST_PLAID)
        if merged and not hasattr(fast_plaid.FastPlaid, "freeze"):
            # Which takes the index for an empty one, and panics.
            raise RecipeError("it is of a newer fast-plaid; with fast-plaid 1.4.7 or newer it can be searched")
        padded, _ = queries.to_padded()
        with (
            as_recipe_error("fast-plaid cannot search it", (Exception,)),  # it is in Rust
            fast_plaid.FastPlaid(str(folder), device=str(queries.device), low_memory=False) as plaid,
            searching(),
        ):
            found = plaid.search(padded, top_k=k, n_full_scores=FULL_SCORES, show_progress=False)
        scores = [torch.tensor([score for _, score in row], dtype=torch.float32) for row in found]
        positions = [torch.tensor([position for position, _ in row], dtype=torch.int64) for row in found]
        return pad_sequence(scores, batch_first=True), pad_sequence(positions, batch_first=True, padding_value=-1)


def open_plaid(folder: Path) -> PlaidIndex:
    """The index in a folder, mapped into memory. RecipeError if it cannot be used."""
    with as_recipe_error("--plaid", (ValueError, OSError)):
        return PlaidIndex(folder, read_plaid(folder))


def overlap(positions: Tensor, own: Tensor) -> dict[str, float]:
    """The share of the first documents of the exhaustive rankings ``[Nq, K]`` that PLAID has among as many first ones."""
    shares = {}
    for depth in DEPTHS:
        if depth <= positions.shape[1]:
            rows = zip(positions[:, :depth].tolist(), own[:, :depth].tolist(), strict=True)
            shares[f"overlap@{depth}"] = sum(len({*row} & {*found}) for row, found in rows) / (depth * len(positions))
    return shares
