"""Hard negatives: the best documents of each query by exact search, without likely positives."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.recipes.compression import Compress, compressor, needs_codec, sampled, train_codec
from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Compute, Work, read_part, read_parts
from pylate_fastmaxsim.recipes.mining.teacher import require_finite_scores
from pylate_fastmaxsim.recipes.models.load import HostModel
from pylate_fastmaxsim.recipes.models.retriever import BATCHES_AT_ONCE, retriever_of
from pylate_fastmaxsim.reporting.progress import Progress
from pylate_fastmaxsim.retrieval.search import ordered, pair_scores, search
from pylate_fastmaxsim.tokens import TokenBatch


class DocumentSearch:
    """Exact search of the documents of all pairs with the model that mines, part by part.

    Documents are scored as ``mining.corpus_format`` and ``mining.pool_factor`` say. One process trains the codec of the
    format, which is kept for all. Every part depends on the settings ``common``.
    """

    def __init__(
        self, model: HostModel, pairs: Pairs, section: MiningSection, work: Work, common: dict[str, Any]
    ) -> None:
        self.model, self.pairs, self.section, self.work = model, pairs, section, work
        self.common = common | {f"mining.{key}": getattr(section, key) for key in ("corpus_format", "pool_factor")}
        self.retriever = retriever_of(model, pool_factor=section.pool_factor)
        self.compress = self._load_compressor()

    def best_documents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the best documents of each query, ``[Nq, K]``."""
        k = documents_kept(self.pairs, self.section)

        def compute(part: slice, bar: Progress) -> dict[str, np.ndarray]:
            documents = self.pairs.documents.select(range(part.start, part.stop))
            scores, found = search(self._queries, map(self.compress, self._encoded(documents, bar)), k)
            scores = scores.cpu().numpy()
            require_finite_scores(self._name_of_model(), scores)  # a NaN is always among the best
            return {"scores": scores, "found": found.cpu().numpy() + part.start}

        best = None
        for file in self._search_parts({}, compute):
            with np.load(file) as arrays:
                scores, found = (torch.from_numpy(arrays[name]) for name in ("scores", "found"))
            if best is not None:
                scores, found = (torch.cat(columns, dim=1) for columns in zip(best, (scores, found), strict=True))
            best = ordered(scores, found, k)
        return best

    def best_candidates(self, candidates: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the best of a first stage's candidates ``[Nq, K]``; -inf and -1 where there are too few.

        Only candidates are encoded.
        """
        digest = hashlib.blake2b(candidates.data, digest_size=16).hexdigest()
        scores = np.full(candidates.shape, -np.inf, dtype=np.float32)
        step = self.section.documents_per_part

        def inside(begin: int) -> np.ndarray:
            return (candidates >= begin) & (candidates < begin + step)

        def compute(part: slice, bar: Progress) -> np.ndarray:
            rows, columns = inside(part.start).nonzero()
            return self._scores_of_pairs(rows, candidates[rows, columns], part, bar)

        files = self._search_parts({"the candidates of mining.first_stage": digest}, compute)
        for begin, file in zip(range(0, len(self.pairs.documents), step), files, strict=True):
            scores[inside(begin)] = read_part(file)
        kept = documents_kept(self.pairs, self.section)
        return ordered(torch.from_numpy(scores), torch.from_numpy(candidates), kept)

    def lowest_positive_scores(self) -> list[float]:
        """The score of the worst positive of each query."""
        pairs = np.array(self.pairs.rows)

        def compute(part: slice, bar: Progress) -> np.ndarray:
            return self._scores_of_pairs(*pairs[part].T, part, bar)

        title, per = "Scoring positives", "rows_per_part"
        files = self.work.parts("positives", self.common, title, " pairs", len(pairs), per, compute)
        lowest = np.full(len(self.pairs.queries), np.inf, dtype=np.float32)
        np.minimum.at(lowest, pairs[:, 0], read_parts(files))
        return lowest.tolist()

    def _search_parts(self, settings: dict[str, Any], compute: Compute) -> list[Path]:
        settings = self.common | settings | {"mining.range_max": self.section.range_max}
        documents, per = len(self.pairs.documents), "documents_per_part"
        return self.work.parts("search", settings, "Searching", " documents", documents, per, compute)

    def _scores_of_pairs(self, queries: np.ndarray, documents: np.ndarray, part: slice, bar: Progress) -> np.ndarray:
        """MaxSim of pairs ``[P]`` of numbers of a query and a document, each document of which is encoded once."""
        used, places = np.unique(documents, return_inverse=True)
        bar.update(part.stop - part.start - len(used))
        batches = map(self.compress, self._encoded(self.pairs.documents.select(used), bar))
        pairs = (torch.from_numpy(each).to(self._queries.device) for each in (queries, places))
        scores = pair_scores(self._queries, *pairs, batches).cpu().numpy()
        require_finite_scores(self._name_of_model(), scores)
        return scores

    @functools.cached_property
    def _queries(self) -> TokenBatch:
        options = {"is_query": True, "show_progress": self.work.processes.is_main_process}
        return self.retriever.encode(self.pairs.queries[:]["text"], self.section.batch_size, **options)

    def _load_compressor(self) -> Compress:
        key, format = f"mining.corpus_format {self.section.corpus_format}", self.section.corpus_format

        def train(part: slice, bar: Progress) -> dict[str, np.ndarray]:
            documents = self.pairs.documents.select(sampled(len(self.pairs.documents)))
            with Progress("Encoding a sample", len(documents), unit=" documents", disable=bar.disable) as encoded:
                codec = train_codec(key, format, self._encoded(documents, encoded))
            bar.update()
            given = [field.name for field in dataclasses.fields(codec) if field.init]
            return {name: getattr(codec, name).cpu().numpy() for name in given}

        if needs_codec(format):
            (file,) = self.work.parts("codec", self.common, "Training the codec", " codecs", 1, None, train)
            with np.load(file) as arrays:
                codec = ResidualCodec(**{name: torch.from_numpy(arrays[name]) for name in arrays})
            return compressor(key, codec.to(self.model.device))
        return compressor(key, format)

    def _encoded(self, documents: Dataset, bar: Progress) -> Iterator[TokenBatch]:
        for rows in documents.iter(BATCHES_AT_ONCE * self.section.batch_size):
            yield self.retriever.encode(rows["text"], self.section.batch_size, is_query=False)
            bar.update(len(rows["text"]))

    def _name_of_model(self) -> str:
        return f"model.name_or_path {self.common['model']['name_or_path']}"


def documents_kept(pairs: Pairs, section: MiningSection) -> int:
    """The number of documents of a query that are kept, so that ``range_max`` are left without its positives."""
    return section.range_max + max(map(len, pairs.positives()))


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
