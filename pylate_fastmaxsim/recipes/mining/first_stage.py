"""Candidates of each query by a sparse search, so that only they need be scored exactly."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import scipy.sparse
import torch
from pylate.models import ColBERT
from sentence_transformers import SparseEncoder
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from pylate_fastmaxsim.recipes.config.schema import FirstStageSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.negatives import documents_kept
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work
from pylate_fastmaxsim.recipes.models.encode import BATCHES_AT_ONCE, encode
from pylate_fastmaxsim.recipes.models.kind import load_retriever
from pylate_fastmaxsim.retrieval.sparse_index import SparseIndex
from pylate_fastmaxsim.sparse import SparseBatch

logger = logging.getLogger(__name__)

# Sparse documents, read anew at each call.
Batches = Callable[[], Iterator[SparseBatch]]


class FirstStage(Protocol):
    """Sparse vectors of texts, and their weights in a collection."""

    def queries(self, texts: Sequence[str]) -> SparseBatch: ...

    def documents(self, texts: Sequence[str]) -> SparseBatch: ...

    def weighted(self, batches: Batches) -> Iterator[SparseBatch]:
        """All documents of the collection as they are searched."""
        ...


def load_first_stage(section: MiningSection, model: ColBERT, pairs: Pairs) -> FirstStage:
    """The first stage that ``mining.first_stage`` names. ``model`` is that of the recipe.

    Raises
    ------
    RecipeError
        It has fewer candidates than mining needs of a query, or its model cannot be loaded or is of another kind.
    """
    first, needed = section.first_stage, documents_kept(pairs, section)
    if first.k < needed:
        raise RecipeError(
            f"mining.first_stage.k must be at least {needed}, mining.range_max plus the largest number of positives of a "
            f"query, got {first.k}."
        )
    if first.kind == "bm25":
        return BM25(model.tokenizer, first.k1, first.b)
    encoder = load_retriever(first.model, model.device, key="mining.first_stage.model")
    if not isinstance(encoder, SparseEncoder):
        raise RecipeError(
            f"mining.first_stage.model {first.model} must be a SparseEncoder with mining.first_stage.kind sparse, but it is "
            "a ColBERT."
        )
    return _Encoder(encoder, section.batch_size)


@dataclass(frozen=True)
class _Encoder:
    model: SparseEncoder
    batch_size: int

    def queries(self, texts: Sequence[str]) -> SparseBatch:
        return encode(self.model, texts, self.batch_size, is_query=True)

    def documents(self, texts: Sequence[str]) -> SparseBatch:
        return encode(self.model, texts, self.batch_size, is_query=False)

    def weighted(self, batches: Batches) -> Iterator[SparseBatch]:
        return batches()


@dataclass(frozen=True)
class BM25:
    """BM25 on the tokens of a tokenizer, without special ones.

    ``queries`` and ``documents`` count tokens; ``weighted`` makes the counts of all documents BM25's weights. The inverse
    document frequency is Lucene's, which is above 0 for every token.

    Examples
    --------
    >>> from pylate_fastmaxsim import sparse_search
    >>> from pylate_fastmaxsim.recipes.mining.first_stage import BM25
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, "[UNK]"))
    >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> bm25 = BM25(PreTrainedTokenizerFast(tokenizer_object=tokenizer), k1=1.2, b=0.75)
    >>> documents = bm25.documents(["a a b", "a", "c"])
    >>> sparse_search(bm25.queries(["a"]), bm25.weighted(lambda: iter([documents])), k=2)
    (tensor([[0.5620, 0.5276]]), tensor([[1, 0]]))
    """

    tokenizer: PreTrainedTokenizerBase
    k1: float
    b: float

    def queries(self, texts: Sequence[str]) -> SparseBatch:
        return self.documents(texts)

    def documents(self, texts: Sequence[str]) -> SparseBatch:
        # Not verbose, which would warn of texts that are longer than the model takes.
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids = self.tokenizer(list(texts), **options)["input_ids"]
        offsets = np.cumsum([0, *map(len, ids)])
        terms = np.fromiter((term for row in ids for term in row), dtype=np.int64, count=offsets[-1])
        shape = (len(ids), len(self.tokenizer))
        return SparseBatch.from_scipy(scipy.sparse.csr_array((np.ones(len(terms)), terms, offsets), shape=shape))

    def weighted(self, batches: Batches) -> Iterator[SparseBatch]:
        holding, tokens, count = torch.zeros(len(self.tokenizer), dtype=torch.float64), 0.0, 0
        for batch in batches():
            holding += batch.terms.long().bincount(minlength=len(holding))
            tokens += batch.weights.sum(dtype=torch.float64).item()
            count += len(batch)
        inverse = torch.log1p((count - holding + 0.5) / (holding + 0.5))
        # Without any token there is nothing to weigh.
        average = tokens / count or 1.0
        for batch in batches():
            lengths = _sums(batch) / average
            scale = self.k1 * (1 - self.b + self.b * lengths).repeat_interleave(batch.offsets.diff())
            often = batch.weights.double()
            weights = inverse[batch.terms.long()] * often * (self.k1 + 1) / (often + scale)
            yield SparseBatch._trusted(batch.offsets, batch.terms, weights.float(), batch.vocabulary)


def _sums(batch: SparseBatch) -> Tensor:
    """The sum of the weights of each vector, ``[N]`` float64."""
    return torch.nn.functional.pad(batch.weights.double().cumsum(0), (1, 0))[batch.offsets].diff()


def find_candidates(
    stage: FirstStage, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any], device: torch.device
) -> np.ndarray:
    """Numbers of the candidates of each query, ``[Nq, K]`` int32, best first; -1 where too few share a term with it."""
    first, documents = section.first_stage, len(pairs.documents)
    k = min(first.k, documents)
    # Sparse vectors are searched on these two.
    device = device if device.type == "cuda" else torch.device("cpu")

    def encode_documents(part: slice, bar: tqdm) -> dict[str, np.ndarray]:
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
        "mining.first_stage": _deciding(first),
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

    def search(part: slice, bar: tqdm) -> np.ndarray:
        queries = stage.queries(pairs.queries[part.start : part.stop]["text"]).to(device)
        _, found = index().search(queries, k)
        bar.update(len(queries))
        return found.int().cpu().numpy()

    step = section.rows_per_part
    settings = made | {"mining.first_stage": asdict(first), "mining.rows_per_part": step}
    title = "Searching the first stage"
    files = work.parts("candidates", settings, title, " queries", len(pairs.queries), step, search)
    candidates = np.concatenate(list(map(np.load, files)))
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


def _deciding(first: FirstStageSection) -> dict[str, Any]:
    """Of the settings those that the sparse vectors on disk depend on."""
    return {name: getattr(first, name) for name in ("kind", "model")}


def _read(file: Path) -> SparseBatch:
    with np.load(file) as arrays:
        offsets, terms, weights = (torch.from_numpy(arrays[name]) for name in ("offsets", "terms", "weights"))
        return SparseBatch._trusted(offsets, terms, weights, int(arrays["vocabulary"]))
