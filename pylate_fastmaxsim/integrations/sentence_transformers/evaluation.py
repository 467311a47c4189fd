"""Information retrieval evaluators of Sentence Transformers, with a search that stays on the device of the scores.

Stock takes the best documents of each query from every chunk of the corpus to Python, and sorts them there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable

import torch
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from torch import Tensor
from tqdm import trange

from pylate_fastmaxsim.integrations.patching.fallback import FallbackToHost
from pylate_fastmaxsim.integrations.patching.patches import Patch

# It encodes, searches and computes metrics for dense embeddings too.
Evaluator = SparseInformationRetrievalEvaluator.__base__

# Scores and positions of the best documents of each query, [Nq, at most k].
Ranking = tuple[Tensor, Tensor]


def patches_of(evaluator: type[Evaluator], all_metrics: Callable) -> list[Patch]:
    """Replacements of what an evaluator searches in. The NanoBEIR evaluators go through the others."""
    # From release 5.4 on it has both names.
    names = "compute_metrices", "compute_all_metrics"
    return [Patch(evaluator, name, all_metrics) for name in names if hasattr(evaluator, name)]


def metrics_by(
    find: Callable[[str, Tensor, object, Tensor, int], Ranking],
    evaluator: Evaluator,
    model,
    corpus_model=None,
    corpus_embeddings=None,
    output_path=None,
) -> dict[str, dict]:
    """What ``compute_all_metrics`` of an evaluator returns, writes and logs.

    ``find(name, queries, documents, order, k)`` gives what a score function of the evaluator finds in a chunk of the
    corpus, best first, at positions in ``order``, in which the first of equal documents wins.
    """
    if not evaluator.queries or not evaluator.corpus:
        raise FallbackToHost("there are no queries with relevant documents, or no documents")
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
    corpus_model = model if corpus_model is None else corpus_model

    def of_chunk(start: int, end: int) -> dict[str, Ranking]:
        if corpus_embeddings is None:
            documents = evaluator.embed_inputs(
                corpus_model,
                evaluator.corpus[start:end],
                encode_fn_name="document",
                prompt_name=evaluator.corpus_prompt_name,
                prompt=evaluator.corpus_prompt,
            )
        elif isinstance(corpus_embeddings, Tensor) and corpus_embeddings.is_sparse:
            documents = corpus_embeddings.index_select(0, torch.arange(start, end, device=corpus_embeddings.device))
        else:
            documents = corpus_embeddings[start:end]
        chunk_ranks, order = ranks[start:end].sort()
        found = {name: find(name, queries, documents, order, k) for name in evaluator.score_functions}
        return {name: (scores, chunk_ranks.to(places.device)[places]) for name, (scores, places) in found.items()}

    size, count = evaluator.corpus_chunk_size, len(evaluator.corpus)
    best: dict[str, Ranking] = {}
    for start in trange(0, count, size, desc="Corpus Chunks", disable=not evaluator.show_progress_bar):
        for name, found in of_chunk(start, min(start + size, count)).items():
            best[name] = _merged(best[name], found, k) if name in best else found
    return _report(evaluator, {name: _results(evaluator, ranks, found) for name, found in best.items()}, output_path)


def _ranks(evaluator: Evaluator) -> Tensor:
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


def _results(evaluator: Evaluator, ranks: Tensor, best: Ranking) -> list[list[dict]]:
    """The best documents of each query as the evaluator's metrics take them."""
    ids = [evaluator.corpus_ids[position] for position in ranks.argsort().tolist()]
    return [
        [{"corpus_id": ids[rank], "score": score} for score, rank in zip(*row, strict=True)]
        for row in zip(*(each.tolist() for each in best), strict=True)
    ]


def _report(evaluator: Evaluator, results: dict[str, list], output_path: str | None) -> dict:
    """Write and log results as the evaluator does, and compute its metrics."""
    logger = logging.getLogger(Evaluator.__module__)
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
