"""Exact search in the place of the score matrices of ``SparseInformationRetrievalEvaluator``."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable

import torch
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from torch import Tensor
from tqdm import trange

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.sparse_encoder.search import reader_for, replaces, top

# It encodes, searches and computes metrics for dense embeddings too.
_Evaluator = SparseInformationRetrievalEvaluator.__base__
# From release 5.4 on it has both names.
_NAMES = "compute_metrices", "compute_all_metrics"

# Scores and ranks of the best documents of each query, [Nq, at most k].
Ranking = tuple[Tensor, Tensor]


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers. The NanoBEIR evaluator goes through it."""
    return [Patch(_Evaluator, name, all_metrics) for name in _NAMES if name in vars(_Evaluator)]


@replaces(_Evaluator.compute_metrices)
def all_metrics(
    options: Options, evaluator, model, corpus_model=None, corpus_embeddings=None, output_path=None
) -> dict[str, dict]:
    if not isinstance(evaluator, SparseInformationRetrievalEvaluator):
        return all_metrics.__wrapped__(evaluator, model, corpus_model, corpus_embeddings, output_path)
    if not evaluator.queries or not evaluator.corpus:
        raise FallbackToHost("there are no queries with relevant documents, or no documents")
    searches = {name: _Search(function) for name, function in evaluator.score_functions.items()}
    queries = evaluator.embed_inputs(
        model,
        evaluator.queries,
        encode_fn_name="query",
        prompt_name=evaluator.query_prompt_name,
        prompt=evaluator.query_prompt,
    )
    ks = (
        *(evaluator.mrr_at_k, evaluator.ndcg_at_k, evaluator.map_at_k),
        *(evaluator.accuracy_at_k, evaluator.precision_recall_at_k),
    )
    k = max(map(max, ks))
    ranks = _ranks(evaluator)
    best: dict[str, Ranking] = {}
    for start in trange(
        0,
        len(evaluator.corpus),
        evaluator.corpus_chunk_size,
        desc="Corpus Chunks",
        disable=not evaluator.show_progress_bar,
    ):
        end = min(start + evaluator.corpus_chunk_size, len(evaluator.corpus))
        if corpus_embeddings is None:
            documents = evaluator.embed_inputs(
                model if corpus_model is None else corpus_model,
                evaluator.corpus[start:end],
                encode_fn_name="document",
                prompt_name=evaluator.corpus_prompt_name,
                prompt=evaluator.corpus_prompt,
            )
        else:
            documents = corpus_embeddings.index_select(0, torch.arange(start, end, device=corpus_embeddings.device))
        chunk_ranks, order = ranks[start:end].sort()
        for name, search in searches.items():
            scores, positions = search(queries, documents, order, k, model.device)
            found = scores, chunk_ranks[positions]
            best[name] = _merged(best[name], found, k) if name in best else found
    return _report(evaluator, {name: _results(evaluator, ranks, found) for name, found in best.items()}, output_path)


class _Search:
    """Search of chunks by a score function of the evaluator."""

    def __init__(self, score_function: Callable) -> None:
        self._score_function = score_function
        self._read = reader_for(score_function)

    def __call__(self, queries: Tensor, documents: Tensor, order: Tensor, k: int, device: torch.device) -> Ranking:
        """Scores and positions in ``order`` of the best documents of each query, ``[Nq, at most k]`` on the CPU."""
        try:
            of_queries, of_documents = self._read(queries), self._read(documents)
            found = top(of_queries.to(device) if device.type == "cuda" else of_queries, of_documents.select(order), k)
        except FallbackToHost as reason:
            # Not the whole function of the host, which would encode again.
            host = "Sentence Transformers"
            log_once("%s is not accelerated (running %s's own): %s.", _Evaluator.__name__, host, reason)
            scores = self._score_function(queries, documents)
            found = scores[:, order.to(scores.device)].sort(dim=1, descending=True, stable=True)
        return tuple(each[:, :k].cpu() for each in found)


def _ranks(evaluator: SparseInformationRetrievalEvaluator) -> Tensor:
    """Order of documents with equal scores, ``[N]``: from release 6 by their ids, before by their positions."""
    if hasattr(evaluator, "get_corpus_id_ranks"):
        return evaluator.get_corpus_id_ranks()
    return torch.arange(len(evaluator.corpus))


def _merged(one: Ranking, other: Ranking, k: int) -> Ranking:
    """The ``k`` best of two; equal scores by rank."""
    scores, ranks = (torch.cat(pair, dim=1) for pair in zip(one, other, strict=True))
    order = ranks.argsort(dim=1)
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :k]
    return scores.gather(1, order), ranks.gather(1, order)


def _results(evaluator: SparseInformationRetrievalEvaluator, ranks: Tensor, best: Ranking) -> list[list[dict]]:
    """The best documents of each query as the evaluator's metrics take them."""
    ids = [evaluator.corpus_ids[position] for position in ranks.argsort().tolist()]
    return [
        [{"corpus_id": ids[rank], "score": score} for score, rank in zip(*row, strict=True)]
        for row in zip(*(each.tolist() for each in best), strict=True)
    ]


def _report(evaluator: SparseInformationRetrievalEvaluator, results: dict[str, list], output_path: str | None) -> dict:
    """Write and log results as the evaluator does, and compute its metrics."""
    logger = logging.getLogger(_Evaluator.__module__)
    if evaluator.write_predictions and output_path is not None:
        os.makedirs(output_path, exist_ok=True)
        for name, rows in results.items():
            file = evaluator.predictions_file.replace(".jsonl", f"_{name}.jsonl")
            with open(os.path.join(output_path, file), "w", encoding="utf-8") as lines:
                for query_id, query, row in zip(evaluator.queries_ids, evaluator.queries, rows, strict=True):
                    lines.write(json.dumps({"query_id": query_id, "query": query, "results": row}) + "\n")
    logger.info(f"Queries: {len(evaluator.queries)}")
    logger.info(f"Corpus: {len(evaluator.corpus)}\n")
    metrics = {name: evaluator.compute_metrics(rows) for name, rows in results.items()}
    for name in evaluator.score_function_names:
        logger.info(f"Score-Function: {name}")
        evaluator.output_scores(metrics[name])
    return metrics
