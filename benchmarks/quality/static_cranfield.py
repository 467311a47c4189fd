"""Static late interaction on the Cranfield collection: quality and sparsity against the threshold.

    python -m benchmarks static_cranfield --data FOLDER    # measure what is missing, print the table, draw the plot

The table of token vectors is made of all-MiniLM-L6-v2 as model2vec does it, without training: each token of the vocabulary
alone through the encoder, the mean of its outputs, PCA to 256 dimensions, and a weight by the rank of the token (SIF over
Zipf's law), which the norm holds. Beside it: BM25 over the same tokens, and MaxSim of the encoder's own outputs.

A cell is a threshold and weights, or one of the others. Metrics are of the judged queries over the whole collection.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.cranfield import encoder_folder
from pylate_fastmaxsim import BM25, SparseBatch, SparseIndex, StaticLateInteraction
from pylate_fastmaxsim.retrieval.static.documents import Neighbours, from_neighbours, neighbours_above

FLOOR = 0.2
THRESHOLDS = (FLOOR, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
VALUE_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# What similarities at least as large as the threshold become: by name, the power that BM25's saturation multiplies.
VALUES = {"values": None, "BM25": 1, "BM25 of squares": 2}
# Of query tokens, as StaticLateInteraction takes them.
QUERY_WEIGHTS: dict[str, str | None] = {"none": None, "norms": "norms", "IDF": "idf"}
BM25_CELL, ENCODER_CELL, MAXSIM_CELL = "BM25", "encoder", "MaxSim"
# Of each line: weights of query tokens, weights of document tokens, thresholds.
LINES = {
    "no weights": ("none", None, THRESHOLDS),
    "norms of model2vec": ("norms", None, THRESHOLDS),
    "IDF": ("IDF", None, THRESHOLDS),
    "IDF and BM25's saturation": ("IDF", "BM25", VALUE_THRESHOLDS),
}
VALUE_ROWS = {
    "values, no weights": ("none", "values"),
    "values, IDF": ("IDF", "values"),
    "IDF and BM25's saturation": ("IDF", "BM25"),
    "the same of squares": ("IDF", "BM25 of squares"),
}
DIMENSIONS = 256
SIF = 1e-4  # of model2vec
LENGTHS = {"query_length": 64, "document_length": 256}  # tokens; the encoder was trained on up to 256
FEW = 64  # documents whose entries are counted where nothing is cut
DEPTH = 101  # of rankings; the metrics look at 100, and a document may be the query itself


class Task:
    """The collection, and the encoder's table of token vectors."""

    def __init__(self, data: Path, encoder: Path | None = None) -> None:
        from pylate_fastmaxsim.recipes.data.collection import document_texts, load_collection

        self.folder = encoder or encoder_folder()
        self.collection = load_collection(str(data))
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
        from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_of, ranking

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
        self.tokens = self.static(FLOOR).token_ids(task.documents)

    def static(self, threshold: float | str, **options: Any) -> StaticLateInteraction:
        return StaticLateInteraction(self.task.table, tokenizer=self.task.tokenizer, threshold=threshold, **options)

    @cached_property
    def queries(self) -> dict[str, SparseBatch]:
        """Queries by the weights of their tokens, which documents do not depend on."""
        return {
            name: self.static(FLOOR, query_weights=weights).fit(self.tokens).queries(self.task.queries)
            for name, weights in QUERY_WEIGHTS.items()
        }

    @cached_property
    def above_floor(self) -> Neighbours:
        """Pairs of tokens whose similarity exceeds the lowest number among the thresholds.

        Those of a higher threshold are among them, so that the product of the tables is made once.
        """
        model = self.static(FLOOR)
        used = self.tokens.ids.unique().long()
        return neighbours_above(model.query_vectors, model.document_vectors, used, model.thresholds)

    def shifted(self, threshold: float) -> dict[str, Any]:
        """Documents that bound MaxSim, ranked by the bound."""
        table = picked(self.above_floor, self.above_floor.weights > threshold - FLOOR, threshold - FLOOR)
        return self.cell(from_neighbours(self.tokens, table, None, None), QUERY_WEIGHTS)

    def values(self, threshold: float, power: float | None) -> dict[str, Any]:
        """Documents whose weights are similarities, or with a power these with BM25's saturation."""
        # The cosine of a vector with itself is 1.
        similarities = ((self.above_floor.weights.double() + FLOOR) * 2**20).round() * 2.0**-20
        weights = (similarities ** (power or 1)).float()
        table = picked(replace(self.above_floor, weights=weights), similarities >= threshold, 0.0)
        mean = len(self.tokens.ids) / len(self.tokens)
        factor = None if power is None else partial(BM25().of_counts, mean_length=mean)
        weights_of_queries = QUERY_WEIGHTS if power is None else ["IDF"]
        return self.cell(from_neighbours(self.tokens, table, None, factor), weights_of_queries)

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
        from pylate_fastmaxsim.recipes.models.retriever import retriever_of

        encoder = retriever_of(self.task.encoder)
        documents = encoder.encode(self.task.documents, 32, is_query=False)
        queries = encoder.encode(self.task.queries, 32, is_query=True)
        return {"metrics": {"none": self.task.metrics(*encoder.search(queries, [documents], DEPTH))}}


def picked(table: Neighbours, kept: Tensor, less: float) -> Neighbours:
    """Some of the pairs, with weights that are so much lower."""
    ends = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    first = ends[table.first.clamp(min=0)]
    sizes = ends[table.first.clamp(min=0) + table.sizes] - first
    weights = (table.weights[kept].double() - less).float()
    return Neighbours(first.where(table.first >= 0, -1), sizes, table.terms[kept], weights)


def require_data(options: argparse.Namespace) -> Path:
    if options.data is None:
        raise SystemExit("--data is needed: the folder of the Cranfield collection, in BEIR's layout.")
    return options.data


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of the collection, in BEIR's layout")
    parser.add_argument("--encoder", type=Path, help="folder of all-MiniLM-L6-v2; by default that of its package")


def cells(_: argparse.Namespace) -> dict[str, dict]:
    return {
        BM25_CELL: {},
        ENCODER_CELL: {},
        **{cell_name(each): {"threshold": each} for each in THRESHOLDS},
        **{cell_name(each, name): {"threshold": each, "values": name} for name in VALUES for each in VALUE_THRESHOLDS},
        MAXSIM_CELL: {},
    }


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if not cells:
        return
    measured = Measured(Task(require_data(options), options.encoder))
    named = {BM25_CELL: measured.plain_bm25, ENCODER_CELL: measured.encoder, MAXSIM_CELL: measured.maxsim}
    for name, cell in cells.items():
        if name in named:
            yield name, named[name]()
        else:
            values = cell.get("values")
            make = measured.shifted if values is None else partial(measured.values, power=VALUES[values])
            yield name, make(cell["threshold"])


def cell_name(threshold: float, weights: str | None = None) -> str:
    return "/".join(filter(None, (f"threshold={threshold}", weights)))


def ndcg(cell: dict, weights: str) -> str:
    return f"{cell['metrics'][weights]['ndcg@10']:.4f}" if weights in cell["metrics"] else ""


def markdown(content: dict) -> str:
    """Quality and entries by threshold, of bounds of MaxSim and with BM25's weights; and what stands beside them."""
    cells = content["cells"]
    rows = [_row("none is cut: MaxSim", cells[MAXSIM_CELL])] if MAXSIM_CELL in cells else []
    rows += [_row(f"{each:g}", cells[cell_name(each)]) for each in THRESHOLDS if cell_name(each) in cells]
    columns = ["threshold", "entries a document", *(f"nDCG@10, weights: {name}" for name in QUERY_WEIGHTS)]
    parts = [table(columns, rows)]
    rows = [
        [title, *(ndcg(cells.get(cell_name(each, name), {"metrics": {}}), weights) for each in VALUE_THRESHOLDS)]
        for title, (weights, name) in VALUE_ROWS.items()
    ]
    parts.append(
        f"nDCG@10 where similarities at least as large as the threshold are kept; BM25 has {ndcg(cells[BM25_CELL], 'IDF')}:"
    )
    parts.append(table(["", *(f"{each:g}" for each in VALUE_THRESHOLDS)], rows))
    return "\n\n".join(parts)


def _row(title: str, cell: dict) -> list[str]:
    return [title, f"{cell['nonzeros']:,.0f}", *(ndcg(cell, name) for name in QUERY_WEIGHTS)]


def plot(content: dict, target: Path) -> None:
    """nDCG@10 against the entries of a document, a point for each threshold, beside the results file."""
    from benchmarks.harness.plots import COLOURS, Line, curves

    cells, lines = content["cells"], []
    for (title, (weights, documents, thresholds)), colour in zip(LINES.items(), COLOURS, strict=True):
        known = {each: cells[cell_name(each, documents)] for each in thresholds if cell_name(each, documents) in cells}
        points = [(cell["nonzeros"], cell["metrics"][weights]["ndcg@10"]) for cell in known.values()]
        texts = [f"{each:g}" for each in known] if title in ("no weights", "IDF and BM25's saturation") else []
        lines.append(Line(title, colour, points, texts=texts))
    ends = [find(x for line in lines for x, _ in line.points) for find in (min, max)]
    for name, title, weights, style in (
        (ENCODER_CELL, "the encoder's late interaction", "none", "--"),
        (BM25_CELL, "BM25", "IDF", ":"),
    ):
        if name in cells:
            lines.append(
                Line(title, COLOURS[0], [(x, cells[name]["metrics"][weights]["ndcg@10"]) for x in ends], style)
            )
    axis = {"xlabel": "entries a document", "ylabel": "nDCG@10", "xscale": "log"}
    curves([(axis, lines)], target.with_suffix(".png"), "Cranfield, by threshold")
