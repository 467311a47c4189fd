"""Static late interaction on the Cranfield collection: quality and sparsity against the threshold.

    python -m benchmarks static_cranfield --data FOLDER    # measure what is missing, print the tables

The table of token vectors is made of all-MiniLM-L6-v2 as model2vec does it, without training: each token of the vocabulary
alone through the encoder, the mean of its outputs, PCA to 256 dimensions, and a weight by the rank of the token (SIF over
Zipf's law), which the norm holds. Beside it: BM25 over the same tokens, and MaxSim of the encoder's own outputs; and the
table as a StaticEmbedding, made or trained by Sentence Transformers on titles and texts of the collection, with one table or
one for each side. Of learning rates from 1e-3 to 5e-2 the last had the lowest training loss.

A cell is a threshold and weights, or one of the others. Metrics are of the judged queries over the whole collection.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.cranfield import add_data, encoder_folder, require_data
from pylate_fastmaxsim import BM25, SparseBatch, SparseIndex, StaticLateInteraction, TokenBatch
from pylate_fastmaxsim.recipes.data.collection import document_texts, load_collection
from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_of, ranking
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.retrieval.search import search

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
VALUE_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# What similarities at least as large as the threshold become: by name, the power that BM25's saturation multiplies.
VALUES = {"values": None, "BM25": 1, "BM25 of squares": 2}
# Of query tokens, as StaticLateInteraction takes them.
QUERY_WEIGHTS: dict[str, str | None] = {"none": None, "norms": "norms", "IDF": "idf"}
BM25_CELL, ENCODER_CELL, MAXSIM_CELL = "BM25", "encoder", "MaxSim"
# Tables of a StaticEmbedding by name: how many, and the seeds of their training.
HOSTED = {"as made": (1, ()), "trained": (1, (0, 1, 2)), "trained, two tables": (2, (0, 1, 2))}
TRAINING = {"num_train_epochs": 5, "per_device_train_batch_size": 128, "learning_rate": 5e-2, "warmup_steps": 5}
TRAINING |= {"batch_sampler": "no_duplicates", "report_to": "none", "save_strategy": "no", "use_cpu": True}
# How such a model ranks: by its own embeddings, or by MaxSim of cosines, or of vectors as they are, with weights.
WAYS: dict[str, dict[str, Any] | None] = {
    "mean": None,
    "MaxSim": {},
    "MaxSim, IDF": {"query_weights": "idf"},
    "MaxSim with norms": {"normalize": False},
    "MaxSim with norms, IDF": {"normalize": False, "query_weights": "idf"},
}
DIMENSIONS = 256
SIF = 1e-4  # of model2vec
LENGTHS = {"query_length": 64, "document_length": 256}  # tokens; the encoder was trained on up to 256
FEW = 64  # documents whose entries are counted where nothing is cut
DEPTH = 101  # of rankings; the metrics look at 100, and a document may be the query itself


class Task:
    """The collection, and the encoder's table of token vectors."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = options.encoder or encoder_folder()
        self.collection = load_collection(str(require_data(options)))
        self.documents = document_texts(self.collection.corpus[:])
        self.queries = list(self.collection.queries.values())

    @cached_property
    def encoder(self) -> Any:
        """The encoder as a ColBERT whose projection changes nothing."""
        from pylate.models import ColBERT, Dense
        from sentence_transformers.models import Transformer

        transformer = Transformer(str(self.folder))
        size = transformer.get_word_embedding_dimension()
        projection = Dense(size, size, bias=False, init_weight=torch.eye(size))
        names = {"query_prefix": "", "document_prefix": "", "skiplist_words": [], "do_query_expansion": False}
        return ColBERT(modules=[transformer, projection], device="cpu", **names, **LENGTHS)

    def encoded(self, texts: list[str], is_query: bool) -> TokenBatch:
        return retriever_of(self.encoder).encode(texts, 32, is_query=is_query)

    @cached_property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer.backend_tokenizer

    @cached_property
    def table(self) -> Tensor:
        """Vectors ``[V, 256]`` whose norms hold the weights."""
        vectors = mean_outputs(self.encoder)
        centred = vectors - vectors.mean(dim=0)
        _, _, axes = torch.linalg.svd(centred, full_matrices=False)
        # Tokens of a vocabulary stand in the order of their frequency, nearly.
        share = 1 / torch.arange(2, len(vectors) + 2, dtype=torch.float64)
        weights = SIF / (SIF + share / share.sum())
        reduced = centred @ axes[:DIMENSIONS].T
        return (reduced * weights[:, None]).float()

    def metrics(self, scores: Tensor, positions: Tensor) -> dict[str, float]:
        return metrics_of(ranking(self.collection, scores, positions, DEPTH - 1), self.collection)


@torch.no_grad()
def mean_outputs(model: Any, batch_size: int = 1024) -> Tensor:
    """The mean of the encoder's outputs for each token of the vocabulary alone, ``[V, d]``, float64."""
    tokenizer = model.tokenizer
    model.eval()
    parts = []
    for tokens in torch.arange(len(tokenizer)).split(batch_size):
        begin, end = (torch.full_like(tokens, each) for each in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        rows = torch.stack([begin, tokens, end], dim=1)
        outputs = model[0].auto_model(input_ids=rows, attention_mask=torch.ones_like(rows)).last_hidden_state
        parts.append(outputs.double().mean(dim=1))
    return torch.cat(parts)


class Measured:
    """Static models of a task, measured."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.tokens = self.static("lowest").token_ids(task.documents)

    def static(self, threshold: float | str, **options: Any) -> StaticLateInteraction:
        return StaticLateInteraction(self.task.table, tokenizer=self.task.tokenizer, threshold=threshold, **options)

    @cached_property
    def queries(self) -> dict[str, SparseBatch]:
        """Queries by the weights of their tokens, which documents do not depend on."""
        return {
            name: self.static("lowest", query_weights=weights).fit(self.tokens).queries(self.task.queries)
            for name, weights in QUERY_WEIGHTS.items()
        }

    def threshold(self, threshold: float, values: str | None = None) -> dict[str, Any]:
        """Documents that bound MaxSim, or whose weights are similarities, of some to a power with BM25's saturation."""
        power = None if values is None else VALUES[values]
        weights = None if power is None else BM25(power=power)
        model = self.static(threshold, keep="excess" if values is None else "value", document_weights=weights)
        documents = model.fit(self.tokens).documents(self.tokens)
        return self.cell(documents, QUERY_WEIGHTS if power is None else ["IDF"])

    def hosted(self, tables: int, seeds: Iterable[int]) -> dict[str, Any]:
        """Quality of a StaticEmbedding in each way, the mean of the seeds of its training."""
        found = [self.ways(self.trained(tables, seed)) for seed in seeds] or [self.ways(self.embedding(tables))]
        means = {way: {name: mean(each[way][name] for each in found) for name in found[0][way]} for way in WAYS}
        return {"metrics": means, "means of seeds": [each["mean"]["ndcg@10"] for each in found]}

    def ways(self, model: Any) -> dict[str, dict[str, float]]:
        found = {}
        for name, options in WAYS.items():
            if options is None:
                dense = retriever_of(model)
                documents = dense.encode(self.task.documents, 64, is_query=False)
                results = dense.search(dense.encode(self.task.queries, 64, is_query=True), [documents], DEPTH)
            else:
                static = StaticLateInteraction.from_static_embedding(model, threshold="lowest", **options)
                results = static.fit(self.tokens).search(self.task.queries, self.tokens, DEPTH)
            found[name] = self.task.metrics(*results)
        return found

    def embedding(self, tables: int) -> Any:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Router, StaticEmbedding

        tokenizer = self.static("lowest").tokenizer  # which truncates nothing
        modules = [StaticEmbedding(tokenizer, embedding_weights=self.task.table.clone()) for _ in range(tables)]
        first = modules[0] if tables == 1 else Router.for_query_document(*([module] for module in modules))
        return SentenceTransformer(modules=[first], device="cpu")

    def trained(self, tables: int, seed: int) -> Any:
        from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
        from sentence_transformers.losses import MultipleNegativesRankingLoss

        model = self.embedding(tables)
        rows = self.task.collection.corpus.select_columns(["title", "text"]).filter(lambda row: all(row.values()))
        sides = {"title": "query", "text": "document"} if tables == 2 else {}
        with tempfile.TemporaryDirectory() as folder:
            arguments = SentenceTransformerTrainingArguments(folder, router_mapping=sides, **TRAINING)
            loss = MultipleNegativesRankingLoss(model)
            SentenceTransformerTrainer(model, arguments, rows.shuffle(seed), loss=loss).train()
        return model

    def plain_bm25(self) -> dict[str, Any]:
        model = StaticLateInteraction.bm25(self.task.tokenizer, len(self.task.table)).fit(self.tokens)
        return self.cell(model.documents(self.tokens), ["IDF"])

    def maxsim(self) -> dict[str, Any]:
        """MaxSim of the table over all documents, by weights of query tokens; and documents that nothing is cut of."""
        model = self.static("lowest")
        metrics = {
            name: self.task.metrics(*model.search(queries, self.tokens, DEPTH))
            for name, queries in self.queries.items()
        }
        return {"metrics": metrics, "nonzeros": len(model.documents(self.tokens.part(0, FEW)).terms) / FEW}

    def cell(self, documents: SparseBatch, weights: Iterable[str]) -> dict[str, Any]:
        """Quality by weights of query tokens, and entries of a document."""
        index = SparseIndex.build([documents])
        metrics = {name: self.task.metrics(*index.search(self.queries[name], DEPTH)) for name in weights}
        return {"metrics": metrics, "nonzeros": len(documents.terms) / len(documents)}

    def encoder(self) -> dict[str, Any]:
        """The encoder's own late interaction: its outputs for whole texts."""
        queries, documents = self.task.encoded(self.task.queries, True), self.task.encoded(self.task.documents, False)
        return {"metrics": {"none": self.task.metrics(*search(queries, [documents], DEPTH))}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument("--encoder", type=Path, help="folder of all-MiniLM-L6-v2; by default that of its package")


def cells(_: argparse.Namespace) -> dict[str, dict]:
    return {
        BM25_CELL: {},
        ENCODER_CELL: {},
        **{cell_name(each): {"threshold": each} for each in THRESHOLDS},
        **{cell_name(each, name): {"threshold": each, "values": name} for name in VALUES for each in VALUE_THRESHOLDS},
        MAXSIM_CELL: {},
        **dict.fromkeys(HOSTED, {}),
    }


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if not cells:
        return
    measured = Measured(Task(options))
    named = {BM25_CELL: measured.plain_bm25, ENCODER_CELL: measured.encoder, MAXSIM_CELL: measured.maxsim}
    for name, cell in cells.items():
        if name in HOSTED:
            yield name, measured.hosted(*HOSTED[name])
        else:
            yield name, named[name]() if name in named else measured.threshold(**cell)


def cell_name(threshold: float, weights: str | None = None) -> str:
    return "/".join(filter(None, (f"threshold={threshold}", weights)))


def ndcg(cell: dict, weights: str) -> str:
    return f"{cell['metrics'][weights]['ndcg@10']:.4f}" if weights in cell["metrics"] else ""


def markdown(content: dict) -> str:
    """Quality by weights of query tokens, with the entries of a document; and of each StaticEmbedding in each way."""
    cells = content["cells"]
    rows = [
        [name, f"{cell['nonzeros']:,.0f}" if "nonzeros" in cell else "", *(ndcg(cell, each) for each in QUERY_WEIGHTS)]
        for name, cell in cells.items()
        if name not in HOSTED
    ]
    columns = ["documents", "entries each", *(f"nDCG@10, weights: {name}" for name in QUERY_WEIGHTS)]
    hosted = [[name, *(ndcg(cells[name], way) for way in WAYS)] for name in HOSTED if name in cells]
    of_tables = table(["nDCG@10, table", *WAYS], hosted)
    return f"{table(columns, rows)}\n\n{of_tables}" if rows else of_tables
