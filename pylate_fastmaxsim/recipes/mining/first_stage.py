"""Candidates of each query by a sparse search, so that only they need be scored exactly."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.recipes.mining.negatives import documents_kept
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_parts
from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE, SparseRetriever, StaticRetriever, retriever_of
from pylate_fastmaxsim.reporting.progress import Progress
from pylate_fastmaxsim.retrieval.sparse_index import SparseIndex
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.tokens import BM25, Statistics
from pylate_fastmaxsim.sparse import SparseBatch

if TYPE_CHECKING:
    from pylate.models import ColBERT

logger = logging.getLogger(__name__)

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


def load_first_stage(section: MiningSection, model: ColBERT, pairs: Pairs, device: torch.device) -> FirstStage:
    """Load what ``mining.first_stage`` names; BM25 takes the tokenizer of the recipe's ``model``."""
    first, needed = section.first_stage, documents_kept(pairs, section)
    if first.k < needed:
        raise RecipeError(
            f"mining.first_stage.k must be at least {needed}, mining.range_max plus the largest number of positives of a "
            f"query, got {first.k}."
        )
    if first.kind == "bm25":
        return BM25Stage(model.tokenizer, BM25(first.k1, first.b))
    encoder = retriever_of(load_retriever(first.model, search_device(device), key="mining.first_stage.model"))
    wanted = {"sparse": SparseRetriever, "static": StaticRetriever}[first.kind]
    if type(encoder) is not wanted:
        raise RecipeError(
            f"mining.first_stage.model {first.model} must be of the kind {wanted.kind} with mining.first_stage.kind {first.kind}, "
            f"but it is of the kind {encoder.kind}."
        )
    if wanted is SparseRetriever:
        encoded = functools.partial(encoder.encode, batch_size=section.batch_size)
        return FirstStage(functools.partial(encoded, is_query=True), functools.partial(encoded, is_query=False))
    with as_recipe_error(f"mining.first_stage.model {first.model} cannot be used"):
        model = encoder.model if first.threshold is None else encoder.model.with_threshold(first.threshold)
        if model.threshold == -torch.inf:  # each document would have an entry for each token
            raise ValueError("it has no threshold; set mining.first_stage.threshold.")
        # A model that needs counts of tokens and has none is found before hours of work.
        model.queries(["a"]), model.documents(["a"])
    return FirstStage(model.queries, model.documents)


def search_device(device: torch.device) -> torch.device:
    """The device of a sparse search: a CUDA GPU, or the CPU."""
    return device if device.type == "cuda" else torch.device("cpu")


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


def find_candidates(
    stage: FirstStage, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any], device: torch.device
) -> np.ndarray:
    """Numbers of the candidates of each query, ``[Nq, K]`` int32, best first; -1 where too few share a term with it."""
    first, documents = section.first_stage, len(pairs.documents)
    k = min(first.k, documents)
    device = search_device(device)

    def encode_documents(part: slice, bar: Progress) -> dict[str, np.ndarray]:
        batches = []
        for rows in pairs.documents.select(range(part.start, part.stop)).iter(BATCHES_AT_ONCE * section.batch_size):
            batches.append(stage.documents(rows["text"]).to("cpu"))
            bar.update(len(batches[-1]))
        batch = SparseBatch.concatenate(batches)
        return {name: getattr(batch, name).numpy() for name in ("offsets", "terms", "weights")} | {
            "vocabulary": np.array(batch.vocabulary)
        }

    made = {
        "mining.pairs or mining.corpus": common["mining.pairs or mining.corpus"],
        # What the sparse vectors on disk depend on.
        "mining.first_stage": {name: getattr(first, name) for name in ("kind", "model", "threshold")},
        # BM25 counts the tokens of its tokenizer.
        **({"model": common["model"]} if first.kind == "bm25" else {}),
    }
    step = section.documents_per_part
    settings = made | {"mining.documents_per_part": step}
    files = work.parts(
        "sparse", settings, "Encoding for the first stage", " documents", documents, step, encode_documents
    )

    @functools.cache
    def index() -> SparseIndex:
        return SparseIndex.build(stage.weighted(lambda: map(_read, files)), device=device)

    def search(part: slice, bar: Progress) -> np.ndarray:
        queries = stage.queries(pairs.queries[part.start : part.stop]["text"]).to(device)
        _, found = index().search(queries, k)
        bar.update(len(queries))
        return found.int().cpu().numpy()

    step = section.rows_per_part
    settings = made | {"mining.first_stage": asdict(first), "mining.rows_per_part": step}
    title = "Searching the first stage"
    files = work.parts("candidates", settings, title, " queries", len(pairs.queries), step, search)
    candidates = read_parts(files)
    needed = min(documents_kept(pairs, section), documents)
    few = int(((candidates >= 0).sum(1) < needed).sum())
    if few and work.processes.is_main_process:
        logger.warning(
            "mining.first_stage finds fewer than %d documents for %d of %d queries, which have fewer to choose from.",
            needed,
            few,
            len(candidates),
        )
    return candidates


def _read(file: Path) -> SparseBatch:
    with np.load(file) as arrays:
        offsets, terms, weights = (torch.from_numpy(arrays[name]) for name in ("offsets", "terms", "weights"))
        return SparseBatch._trusted(offsets, terms, weights, int(arrays["vocabulary"]))
