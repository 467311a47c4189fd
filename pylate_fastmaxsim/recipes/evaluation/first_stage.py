"""A first stage: a sparse search for the candidates of each query, of which late interaction scores the best."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.pooling import Pooling
from pylate_fastmaxsim.recipes.config.schema import FirstStageSection
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import SparseRetriever, StaticRetriever, retriever_of
from pylate_fastmaxsim.retrieval.search import ordered, pair_scores
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.tokens import BM25, Statistics
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

# Makes sparse vectors of texts.
Vectors = Callable[[Sequence[str]], SparseBatch]
# Sparse documents, read anew at each call.
Batches = Callable[[], Iterator[SparseBatch]]


@dataclass
class FirstStage:
    """A sparse search: what makes vectors of queries and of documents."""

    queries: Vectors
    documents: Vectors

    def weighted(self, batches: Batches) -> Iterator[SparseBatch]:
        """All documents of the collection as they are searched."""
        return batches()


def load_first_stage(
    key: str, section: FirstStageSection, tokenizer: PreTrainedTokenizerBase, batch_size: int, device: torch.device
) -> FirstStage:
    """Load what a section names; BM25 takes the tokenizer of the model that scores. ``key`` is what an error calls its model."""
    if section.kind == "bm25":
        return BM25Stage(tokenizer, BM25(section.k1, section.b))
    encoder = retriever_of(load_retriever(section.model, search_device(device), key=key))
    wanted = {"sparse": SparseRetriever, "static": StaticRetriever}[section.kind]
    if type(encoder) is not wanted:
        raise RecipeError(
            f"{key} {section.model} must be of the kind {wanted.kind}, but it is of the kind {encoder.kind}."
        )
    if wanted is SparseRetriever:
        encoded = functools.partial(encoder.encode, batch_size=batch_size)
        return FirstStage(functools.partial(encoded, is_query=True), functools.partial(encoded, is_query=False))
    with as_recipe_error(f"{key} {section.model} cannot be used"):
        model = encoder.model if section.threshold is None else encoder.model.with_threshold(section.threshold)
        if model.threshold == -torch.inf:  # each document would have an entry for each token
            raise ValueError("it has no threshold; save it with one, or set mining.first_stage.threshold.")
        # A model that needs counts of tokens and has none is found before hours of work.
        model.queries(["a"]), model.documents(["a"])
    return FirstStage(model.queries, model.documents)


def first_stage_named(text: str, k: int) -> FirstStageSection:
    """The section of ``bm25``, ``sparse:PATH`` or ``static:PATH``."""
    kind, _, model = text.partition(":")
    if (kind, bool(model)) not in (("bm25", False), ("sparse", True), ("static", True)):
        raise RecipeError(f"--first-stage must be bm25, sparse:MODEL or static:MODEL, got {text}.")
    return FirstStageSection(kind=kind, k=k, model=model or None)


def search_device(device: torch.device) -> torch.device:
    """The device of a sparse search: a CUDA GPU, or the CPU."""
    return device if device.type == "cuda" else torch.device("cpu")


def best_candidates(
    queries: TokenBatch,
    candidates: Tensor,
    documents: Callable[[Tensor], Iterable[TokenBatch | CompressedBatch]],
    k: int,
    pooling: Pooling,
) -> tuple[Tensor, Tensor]:
    """Scores and positions ``[Nq, K]`` of the best of a first stage's candidates ``[Nq, C]``; -inf and -1 for none.

    ``documents`` makes batches of the documents at ascending positions.
    """
    candidates = candidates.to(queries.device)
    rows, columns = (candidates >= 0).nonzero(as_tuple=True)
    used, places = candidates[rows, columns].unique(return_inverse=True)
    scores = torch.full(candidates.shape, -torch.inf, device=queries.device)
    scores[rows, columns] = pair_scores(queries, rows, places, documents(used.cpu()), pooling).float()
    return ordered(scores, candidates, k)


class BM25Stage(FirstStage):
    """BM25 on the tokens of a tokenizer, without special ones, of whole texts.

    ``queries`` and ``documents`` count tokens; ``weighted`` makes the counts of all documents BM25's weights, so that
    processes may count parts of a collection and each of them weighs all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, bm25: BM25) -> None:
        # Without vectors, which BM25 does not compare.
        model = StaticLateInteraction(torch.empty(len(tokenizer), 0), tokenizer=tokenizer, threshold=1.0)
        super().__init__(model.queries, model.queries)
        self.vocabulary, self.bm25 = model.vocabulary, bm25

    def weighted(self, batches: Batches) -> Iterator[SparseBatch]:
        frequencies, tokens, documents = torch.zeros(self.vocabulary, dtype=torch.int64), 0, 0
        for batch in batches():
            frequencies += batch.terms.long().bincount(minlength=self.vocabulary)
            tokens += int(batch.weights.sum(dtype=torch.float64))
            documents += len(batch)
        statistics = Statistics(documents, tokens, frequencies)
        for batch in batches():
            ends = torch.nn.functional.pad(batch.weights.double().cumsum(0), (1, 0))[batch.offsets]
            lengths = ends.diff().repeat_interleave(batch.offsets.diff())
            weights = self.bm25.of_counts(batch.weights, lengths, statistics.mean_length)
            weights *= statistics.idf[batch.terms.long()]
            yield SparseBatch._trusted(batch.offsets, batch.terms, weights.float(), batch.vocabulary)
