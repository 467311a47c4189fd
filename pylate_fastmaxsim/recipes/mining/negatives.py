"""Hard negatives: the best documents of each query by exact search, without likely positives."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.recipes.compression import Compress, compressor, needs_codec, sampled, train_codec
from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_part
from pylate_fastmaxsim.recipes.mining.teacher import Candidates, colbert_scores, require_finite_scores, score_part
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE, retriever_of
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.tokens import TokenBatch

if TYPE_CHECKING:
    from pylate.models import ColBERT


# Pairs of a query and a document that are scored in one call.
PAIRS_AT_ONCE = 1 << 20


class DocumentSearch:
    """Exact search of the documents of all pairs with the model that mines, part by part.

    Documents are scored in ``mining.corpus_format``. One process trains its codec, which is kept for all. Every part
    depends on the settings ``common``.
    """

    def __init__(
        self, model: ColBERT, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any]
    ) -> None:
        self.model, self.pairs, self.section, self.work = model, pairs, section, work
        self.common = common | {"mining.corpus_format": section.corpus_format}
        self.compress = self._load_compressor()

    def best_documents(self, candidates: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the best documents of each query, ``[Nq, K]``.

        With the ``candidates`` of a first stage only those are encoded and scored; a query that has too few is filled up
        with -inf and -1.
        """
        pairs, section, k = self.pairs, self.section, documents_kept(self.pairs, self.section)

        @functools.cache
        def queries() -> TokenBatch:
            options = {"is_query": True, "show_progress": self.work.processes.is_main_process}
            return retriever_of(self.model).encode(pairs.queries[:]["text"], section.batch_size, **options)

        def compute(part: slice, bar: tqdm) -> dict[str, np.ndarray]:
            documents = pairs.documents.select(range(part.start, part.stop))
            scores, found = search(queries(), map(self.compress, self._encoded(documents, bar)), k)
            scores = scores.cpu().numpy()
            require_finite_scores(self._name_of_model(), scores)  # a NaN is always among the best
            return {"scores": scores, "found": found.cpu().numpy() + part.start}

        def compute_candidates(part: slice, bar: tqdm) -> dict[str, np.ndarray]:
            def encoded(numbers: np.ndarray) -> Iterator[TokenBatch | CompressedBatch]:
                bar.update(part.stop - part.start - len(numbers))  # that are no candidate
                return map(self.compress, self._encoded(pairs.documents.select(numbers), bar))

            rows, documents, scores = score_candidates(queries(), encoded, candidates, part)
            require_finite_scores(self._name_of_model(), scores)
            scores, found = best_candidates(rows, documents, scores, len(pairs.queries), k)
            return {"scores": scores, "found": found}

        best = None
        step = section.documents_per_part
        settings = {"mining.range_max": section.range_max, "mining.documents_per_part": step}
        if candidates is not None:
            digest = hashlib.blake2b(candidates.data, digest_size=16).hexdigest()
            settings |= {"the candidates of mining.first_stage": digest}
            compute = compute_candidates
        total = len(pairs.documents)
        for file in self.work.parts("search", self.common | settings, "Searching", " documents", total, step, compute):
            with np.load(file) as arrays:
                scores, found = (torch.from_numpy(arrays[name]) for name in ("scores", "found"))
            if best is not None:
                scores, found = (torch.cat(columns, dim=1) for columns in zip(best, (scores, found), strict=True))
            scores, order = scores.sort(dim=1, descending=True, stable=True)
            best = scores[:, :k], found.gather(1, order[:, :k])
        return best

    def lowest_positive_scores(self) -> list[float]:
        """The score of the worst positive of each query."""
        batch_size, step = self.section.batch_size, self.section.rows_per_part

        def score(pairs: Pairs, candidates: Candidates) -> np.ndarray:
            return colbert_scores(self.model, pairs, candidates, batch_size, self.compress)

        pairs = [(query, [document]) for query, document in self.pairs.rows]
        at_once = BATCHES_AT_ONCE * batch_size
        compute = functools.partial(score_part, self._name_of_model(), score, self.pairs, pairs, at_once)
        settings = self.common | {"mining.rows_per_part": step}
        files = self.work.parts("positives", settings, "Scoring positives", " pairs", len(pairs), step, compute)
        lowest = [float("inf")] * len(self.pairs.queries)
        for (query, _), score in zip(pairs, np.concatenate(list(map(read_part, files)))[:, 0], strict=True):
            lowest[query] = min(lowest[query], score.item())
        return lowest

    def _load_compressor(self) -> Compress:
        key, format = f"mining.corpus_format {self.section.corpus_format}", self.section.corpus_format

        def train(part: slice, bar: tqdm) -> dict[str, np.ndarray]:
            documents = self.pairs.documents.select(sampled(len(self.pairs.documents)))
            with tqdm(
                total=len(documents), desc="Encoding a sample", unit=" documents", disable=bar.disable
            ) as encoded:
                codec = train_codec(key, format, self._encoded(documents, encoded))
            bar.update()
            given = [field.name for field in dataclasses.fields(codec) if field.init]
            return {name: getattr(codec, name).cpu().numpy() for name in given}

        if needs_codec(format):
            (file,) = self.work.parts("codec", self.common, "Training the codec", " codecs", 1, 1, train)
            with np.load(file) as arrays:
                codec = ResidualCodec(**{name: torch.from_numpy(arrays[name]) for name in arrays})
            return compressor(key, codec.to(self.model.device))
        return compressor(key, format)

    def _encoded(self, documents: Dataset, bar: tqdm) -> Iterator[TokenBatch]:
        for rows in documents.iter(BATCHES_AT_ONCE * self.section.batch_size):
            yield retriever_of(self.model).encode(rows["text"], self.section.batch_size, is_query=False)
            bar.update(len(rows["text"]))

    def _name_of_model(self) -> str:
        return f"model.name_or_path {self.common['model']['name_or_path']}"


def documents_kept(pairs: Pairs, section: MiningSection) -> int:
    """The number of documents of a query that are kept, so that ``range_max`` are left without its positives."""
    return section.range_max + max(map(len, pairs.positives()))


def score_candidates(
    queries: TokenBatch,
    encoded: Callable[[np.ndarray], Iterator[TokenBatch | CompressedBatch]],
    candidates: np.ndarray,
    part: slice,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, documents and scores ``[P]`` of the candidates ``[Nq, K]`` whose numbers lie in ``part``.

    ``encoded`` makes batches of documents by their numbers, which ascend. Documents that are no candidate are not asked
    for.
    """
    rows, columns = ((candidates >= part.start) & (candidates < part.stop)).nonzero()
    documents = candidates[rows, columns]
    order = documents.argsort(kind="stable")  # the queries of a document ascend
    rows, documents = rows[order], documents[order]
    used, places = np.unique(documents, return_inverse=True)
    scores = np.empty(len(rows), dtype=np.float32)
    begin = first = 0
    for batch in encoded(used):
        end = int(np.searchsorted(places, first + len(batch)))
        by_query = begin + rows[begin:end].argsort(kind="stable")
        scores[by_query] = pair_scores(queries, batch, rows[by_query], places[by_query] - first)
        begin, first = end, first + len(batch)
    return rows, documents, scores


@torch.no_grad()
def pair_scores(
    queries: TokenBatch, documents: TokenBatch | CompressedBatch, rows: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """MaxSim of pairs ``[P]`` of the query ``rows[p]`` and the document ``places[p]``; ``rows`` ascend."""
    asked, first, counts = np.unique(rows, return_index=True, return_counts=True)
    scores = np.empty(len(rows), dtype=np.float32)

    def on_device(numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(queries.device)

    # Queries with about as many candidates in one call; one that has fewer repeats its last.
    widths = 2 ** np.ceil(np.log2(counts)).astype(np.int64)
    for width in np.unique(widths):
        group, step = np.flatnonzero(widths == width), max(1, PAIRS_AT_ONCE // width)
        for begin in range(0, len(group), step):
            some = group[begin : begin + step]
            at = first[some, None] + np.minimum(np.arange(width), counts[some, None] - 1)
            found = maxsim(queries.select(on_device(asked[some])), documents, on_device(places[at]))
            scores[at] = found.cpu().numpy()
    return scores


def best_candidates(
    rows: np.ndarray, documents: np.ndarray, scores: np.ndarray, num_queries: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and documents of the ``k`` best pairs of each query, best first, ``[Nq, K]`` with K at most ``k``.

    Of equal scores the lower document comes first. Queries with fewer pairs have a score of -inf and a document of -1.
    """
    order = np.lexsort((documents, -scores, rows))
    rows, documents, scores = rows[order], documents[order], scores[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = rank < k
    rows, documents, scores, rank = rows[kept], documents[kept], scores[kept], rank[kept]
    shape = (num_queries, rank.max(initial=-1) + 1)
    best, found = np.full(shape, -np.inf, dtype=np.float32), np.full(shape, -1, dtype=np.int64)
    best[rows, rank], found[rows, rank] = scores, documents
    return best, found


def hard_negatives(
    pairs: Pairs, section: MiningSection, scores: torch.Tensor, found: torch.Tensor, lowest: list[float]
) -> dict[int, list[int]]:
    """The negatives of each query that has enough, hardest first. ``lowest`` are the scores of their worst positives."""
    positives = pairs.positives()
    chosen = {}
    # Row by row, because Python numbers take several times the memory.
    for query, (ranked, documents) in enumerate(zip(scores.numpy(), found.numpy(), strict=True)):
        ranked, documents = ranked.tolist(), documents.tolist()
        # -1 fills up queries with few candidates.
        others = [(s, d) for s, d in zip(ranked, documents, strict=True) if d not in positives[query] and d >= 0]
        allowed = [d for s, d in others if is_negative(section, s, lowest[query])][: section.range_max]
        negatives = allowed[section.range_min : section.range_min + section.num_negatives]
        if len(negatives) == section.num_negatives:
            chosen[query] = negatives
    return chosen


def is_negative(section: MiningSection, score: float, positive: float) -> bool:
    """Tell whether a document may be a negative, by its score and that of the query's worst positive.

    The rules are those of ``sentence_transformers.util.mine_hard_negatives``.
    """
    return not (
        (section.absolute_margin is not None and score + section.absolute_margin > positive)
        or (section.relative_margin is not None and score > positive * (1 - section.relative_margin))
        or (section.max_score is not None and score > section.max_score)
        or (section.min_score is not None and score < section.min_score)
    )
