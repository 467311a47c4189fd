"""A synthetic study of pooling: what the maximum, top-4 and softmax do to gradients, long documents and injected tokens.

    python -m benchmarks pooling_study --workers 16         # measure what is missing, tables, figures
    python -m benchmarks pooling_study --quick --results /tmp/pooling_study.json      # seconds; figures mean nothing

It follows "Spike hijacking in late-interaction retrieval" (arXiv 2604.05253): 100 concepts, tokens of queries and
documents near them, a three-layer encoder, in-batch negatives, and in cells of their own hard negatives. What the text
leaves open is measured in each reading: docs/losses.md#a-study-of-pooling. Runs on CPUs; a cell is one pooling, document
length, dimension and seed, on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from pylate_fastmaxsim import Max, Softmax, TopK, pooled_scores
from pylate_fastmaxsim.diagnostics.gradient_concentration import gradient_concentration
from pylate_fastmaxsim.ops.pooled import Pooling

CONCEPTS = 100
QUERY_TOKENS = 16
QUERY_CONCEPTS = 8  # tokens of a positive that share the concepts of its query's first 8 tokens
NOISE = 0.1  # standard deviation of each component at d = 16; the noise has the same length at any d
TARGETED_NOISE = 0.3  # of tokens that are aimed at a query
OVERLAP = 4  # tokens of a hard negative that share concepts with the query: half of those of a positive
SPIKE_CONCEPTS = 3  # of the query, near whose mean the spike patch of a hard negative lies
BATCH = 64
WIDTH = 64
LEARNING_RATE = 1e-3
LENGTHS = (32, 64, 128, 256)
PANEL_TOKENS = 64  # document tokens M of the cells whose gradients and injection are measured
SWEEP_DIMENSION = 16
KINDS = ("targeted", "random tokens", "random embeddings")  # of injected tokens
INJECTED = (25, 50, 100, 200, 400)

POOLINGS: dict[str, Pooling] = {"max": Max(), "top-4": TopK(4), "softmax": Softmax(1.0)}
INJECTION_DIMENSION = 128
NEGATIVES = ("evaluated", "trained")  # where hard negatives take part; those that are trained on are evaluated too
NAMES = {"tokens": "M", "dimension": "d", "negatives": "negatives"}  # of what makes a cell, in its own name


def generator(seed: int, use: int) -> Generator:
    return Generator().manual_seed(100 * seed + use)


@dataclass(frozen=True)
class Pairs:
    """Queries ``[N, 16, d]``, the concept of each of their tokens ``[N, 16]``, and their positives ``[N, M, d]``."""

    queries: Tensor
    wanted: Tensor
    documents: Tensor
    negatives: Tensor | None = None  # two hard ones of each query, [N, 2, M, d]

    def select(self, rows: Tensor | slice) -> Pairs:
        parts = (self.queries, self.wanted, self.documents, self.negatives)
        return Pairs(*(part if part is None else part[rows] for part in parts))


def near(centres: Tensor, noise: float, random: Generator) -> Tensor:
    """A token near each of ``centres``, ``[..., d]``."""
    scale = noise * (16 / centres.shape[-1]) ** 0.5
    return normalize(centres + scale * torch.randn(centres.shape, generator=random), dim=-1)


class Concepts:
    """``[100, d]`` unit vectors, and tokens drawn near them: float32, of length 1."""

    def __init__(self, dimension: int, seed: int) -> None:
        self.vectors = normalize(torch.randn(CONCEPTS, dimension, generator=generator(seed, 0)), dim=-1)

    def pairs(self, count: int, tokens: int, random: Generator) -> Pairs:
        """Queries with a positive each: tokens of 8 concepts of its query, then of any."""
        wanted = torch.randint(CONCEPTS, (count, QUERY_TOKENS), generator=random)
        found = torch.randint(CONCEPTS, (count, tokens), generator=random)
        found[:, :QUERY_CONCEPTS] = wanted[:, :QUERY_CONCEPTS]
        queries = near(self.vectors[wanted], NOISE, random)
        return Pairs(queries, wanted, near(self.vectors[found], NOISE, random))

    def of_length(self, pairs: Pairs, tokens: int, random: Generator) -> Pairs:
        """The same pairs with documents cut to ``tokens``, or with tokens of random concepts behind them."""
        count, length = pairs.documents.shape[:2]
        more = torch.randint(CONCEPTS, (count, max(0, tokens - length)), generator=random)
        return replace(
            pairs, documents=torch.cat([pairs.documents[:, :tokens], near(self.vectors[more], NOISE, random)], 1)
        )

    def with_negatives(self, pairs: Pairs, random: Generator) -> Pairs:
        """For each query a document that partly overlaps with it, and one with a spike patch."""
        count, tokens = pairs.documents.shape[:2]
        found = torch.randint(CONCEPTS, (count, 2, tokens), generator=random)
        found[:, 0, :OVERLAP] = pairs.wanted[:, :OVERLAP]
        negatives = near(self.vectors[found], NOISE, random)
        picked = torch.rand(pairs.wanted.shape, generator=random).topk(SPIKE_CONCEPTS).indices
        negatives[:, 1, 0] = near(self.vectors[pairs.wanted.gather(1, picked)].mean(1), NOISE, random)
        return replace(pairs, negatives=negatives)


# How much is trained and measured: pairs (as many are held out), epochs, queries that get injected tokens.
SIZE = {"pairs": 512, "epochs": 100, "injected": 128}
QUICK = {"pairs": 64, "epochs": 2, "injected": 8}


class Encoder(nn.Sequential):
    """Three layers, applied to each token ``[..., d]``; embeddings have length 1."""

    def __init__(self, dimension: int) -> None:
        wide = (nn.Linear(dimension, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        super().__init__(*wide, nn.Linear(WIDTH, dimension))

    def forward(self, tokens: Tensor) -> Tensor:
        return normalize(super().forward(tokens), dim=-1)


def concentration(encoder: Encoder, pairs: Pairs, pooling: Pooling) -> dict[str, float]:
    """Gini coefficients by the published formula for the first batch: of the pairs' own scores, and of its loss."""
    queries, documents = (encoder(part[:BATCH]).detach() for part in (pairs.queries, pairs.documents))
    scores = pooled_scores(queries, documents, pooling=pooling).requires_grad_()
    (of_loss,) = torch.autograd.grad(cross_entropy(scores, torch.arange(len(scores))), scores)
    own = torch.arange(len(queries))[:, None]
    measured = {
        "score": gradient_concentration(queries, documents, own, pooling=pooling),
        "loss": gradient_concentration(queries, documents, pooling=pooling, loss_gradient=of_loss),
    }
    return {gradient: round(found.gini_uncorrected, 4) for gradient, found in measured.items()}


def scores_of(encoder: Encoder, pairs: Pairs, pooling: Pooling) -> Tensor:
    """Scores ``[N, N]`` of queries with all positives, or ``[N, N + 2]`` with the hard negatives of each behind them."""
    queries, documents, own = encoder(pairs.queries), encoder(pairs.documents), None
    if pairs.negatives is not None:
        count = torch.arange(len(queries))
        own = torch.cat([count.expand(len(count), -1), len(count) + 2 * count[:, None] + torch.arange(2)], 1)
        documents = torch.cat([documents, encoder(pairs.negatives.flatten(0, 1))])
    return pooled_scores(queries, documents, own, pooling=pooling)


@torch.no_grad()
def recall(encoder: Encoder, pairs: Pairs, pooling: Pooling) -> float:
    """Share of queries whose positive scores highest."""
    best = scores_of(encoder, pairs, pooling).argmax(1)
    return share((best == torch.arange(len(best))).tolist())


@torch.no_grad()
def injection(concepts: Concepts, encoder: Encoder, pairs: Pairs, pooling: Pooling, random: Generator) -> dict:
    """Recall@1 with K tokens injected into documents, by their kind and K.

    ``targeted``: near concepts of the query, with more noise than its own tokens. ``random tokens``: random unit vectors,
    encoded; ``random embeddings``: not encoded. ``others`` is Recall@1 with the same tokens in every document but the
    query's positive, ``all`` with them in every document.
    """
    queries, documents = encoder(pairs.queries), encoder(pairs.documents)
    count, _, dimension = documents.shape
    clean = pooled_scores(queries, documents, pooling=pooling)

    def tokens(kind: str, query: int, number: int) -> Tensor:
        if kind == "targeted":
            picked = pairs.wanted[query][torch.randint(QUERY_TOKENS, (number,), generator=random)]
            return encoder(near(concepts.vectors[picked], TARGETED_NOISE, random))
        drawn = normalize(torch.randn(number, dimension, generator=random), dim=-1)
        return encoder(drawn) if kind == "random tokens" else drawn

    def measured(kind: str, number: int) -> dict[str, float]:
        others, everywhere = [], []
        for query in range(count):
            injected = tokens(kind, query, number)
            longer = torch.cat([documents, injected.expand(count, -1, -1)], 1)
            scores = pooled_scores(queries[query : query + 1], longer, pooling=pooling)[0]
            everywhere.append(int(scores.argmax()) == query)
            scores[query] = clean[query, query]
            others.append(int(scores.argmax()) == query)
        return {"others": share(others), "all": share(everywhere)}

    result: dict = {kind: {str(number): measured(kind, number) for number in INJECTED} for kind in KINDS}
    return {"none": share((clean.argmax(1) == torch.arange(count)).tolist()), **result}


def share(values: list) -> float:
    return round(mean(map(float, values)), 4)


def measured(cell: dict, size: dict) -> dict:
    """Train and measure a cell, on one thread, so that results depend on the seed alone."""
    torch.set_num_threads(1)
    began = time.monotonic()
    pooling, tokens, seed = POOLINGS[cell["pooling"]], cell["tokens"], cell["seed"]
    hard, injected = cell.get("negatives"), cell["dimension"] == INJECTION_DIMENSION
    concepts, pairs = Concepts(cell["dimension"], seed), {}
    for use, name in enumerate(("training", "held_out"), 1):
        pairs[name] = concepts.pairs(size["pairs"], tokens, generator(seed, use))
        if hard:
            pairs[name] = concepts.with_negatives(pairs[name], generator(seed, 4 + use))
    torch.manual_seed(seed)
    encoder = Encoder(cell["dimension"])
    optimizer = torch.optim.Adam(encoder.parameters(), lr=LEARNING_RATE)
    training, gradients = pairs["training"], []
    trained = replace(training, negatives=None) if hard == "evaluated" else training
    for _ in range(size["epochs"]):
        for rows in torch.randperm(size["pairs"]).split(BATCH):
            loss = cross_entropy(scores_of(encoder, trained.select(rows), pooling), torch.arange(len(rows)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if tokens == PANEL_TOKENS and not hard:
            gradients.append(concentration(encoder, training, pooling))
    result: dict = {"loss": round(loss.item(), 4), "recall": {}}
    if gradients:
        result["gini"] = {gradient: [epoch[gradient] for epoch in gradients] for gradient in ("score", "loss")}
    sweep = LENGTHS if gradients and not injected else (tokens,)
    for name, each in pairs.items():
        result["recall"][name] = {
            str(more): recall(encoder, concepts.of_length(each, more, generator(seed, 3)), pooling) for more in sweep
        }
    if injected:
        few = training.select(slice(size["injected"]))
        result["injection"] = injection(concepts, encoder, few, pooling, generator(seed, 4))
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="processes at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="two epochs of one seed; needs another --results")


def recorded(_: str, options: argparse.Namespace) -> dict:
    return {"settings": QUICK if options.quick else SIZE}


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Long ones first, so that no worker is left with one at the end."""
    panel = {"tokens": PANEL_TOKENS, "dimension": SWEEP_DIMENSION}
    kinds = [{"tokens": tokens, "dimension": SWEEP_DIMENSION} for tokens in reversed(LENGTHS)]
    kinds += [panel | {"dimension": INJECTION_DIMENSION}, *(panel | {"negatives": each} for each in NEGATIVES)]
    made = {}
    for kind, pooling, seed in itertools.product(kinds, POOLINGS, [0] if options.quick else options.seeds):
        name = "".join(f"/{NAMES[key]}={value}" for key, value in kind.items())
        made[f"{pooling}{name}/seed={seed}"] = {"cell": {"pooling": pooling, **kind, "seed": seed}}
    return made


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Measure cells, ``workers`` at a time."""
    size = QUICK if options.quick else SIZE
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(measured, cell["cell"], size): name for name, cell in cells.items()}
        for done in as_completed(running):
            yield running[done], done.result()


def markdown(content: dict) -> str:
    from benchmarks.quality.pooling_study_report import checks_table

    return checks_table(content)


def plot(content: dict, target: Path) -> None:
    from benchmarks.quality import pooling_study_report

    pooling_study_report.plot(content, target)
