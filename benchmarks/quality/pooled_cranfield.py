"""Token pooling on the Cranfield collection, with and without a loss over pooled documents, over three seeds.

    python -m benchmarks pooled_cranfield --data FOLDER    # measure what is missing, print the table, draw the plot

A cell is a training as in `cranfield`, short, by the contrastive loss or by its sum over `loss.pool_factors`. Documents are
encoded once and pooled by each factor; metrics are of the judged queries over the whole collection.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from benchmarks.harness.tables import table
from benchmarks.quality import cranfield
from benchmarks.quality.cranfield import CONTRASTIVE, ENCODER, MODEL, SEEDS, Cell, load, run, spread  # noqa: F401

TIMEOUT = 1800
FACTORS = (1, 2, 3, 4, 5, 6)
STEPS = 10
LOSSES = {"contrastive": {}, "pooled": {"loss.pool_factors": [1, 2, 4]}}
TITLES = {"contrastive": "contrastive loss", "pooled": "over pooled documents, factors 1, 2 and 4"}


def measure(asked: dict) -> dict:
    """Train and evaluate a cell."""
    from pylate_fastmaxsim import enabled, pool_tokens
    from pylate_fastmaxsim.recipes.data.collection import load_collection
    from pylate_fastmaxsim.recipes.evaluation.ranking import DEPTH, encode_corpus, metrics_of, ranking
    from pylate_fastmaxsim.recipes.models.load import load_retriever
    from pylate_fastmaxsim.recipes.models.retriever import retriever_of
    from pylate_fastmaxsim.recipes.training.train import train

    cell, output = Cell(**asked["cell"]), Path(asked["output"])
    overrides = {"evaluation": {}, "training.max_steps": STEPS, **LOSSES[cell.stage]}
    recipe = load(cell, Path(asked["data"]), output, **overrides)
    losses = train(recipe)["losses"]
    model = retriever_of(load_retriever(str(cell.folder(output) / "model"), "cpu"))
    collection = load_collection(asked["data"])
    factors = {}
    with enabled():
        queries = model.encode(list(collection.queries.values()), 32, is_query=True)
        documents = list(encode_corpus(model, collection.corpus, 32))
        for factor in FACTORS:
            pooled = [pool_tokens(each, factor, **model.pooling_options) for each in documents]
            found = ranking(collection, *model.search(queries, pooled, DEPTH + 1), DEPTH)
            vectors = sum(int(each.lengths.sum()) for each in pooled)
            factors[factor] = {"vectors": vectors, **metrics_of(found, collection)}
    return {"factors": factors, "losses": losses}


def add_options(parser: argparse.ArgumentParser) -> None:
    cranfield.add_options(parser)
    parser.set_defaults(work=Path("runs/pooled_cranfield"))


def cells(_: argparse.Namespace) -> dict[str, dict]:
    made = [Cell(loss, seed, "fast") for seed in SEEDS for loss in LOSSES]
    return {cell.name: {"cell": asdict(cell)} for cell in made}


def recorded(*_: object) -> dict:
    settings = {"model": MODEL, "training": CONTRASTIVE | {"training.max_steps": STEPS}, **LOSSES}
    return {ENCODER: version(ENCODER), "settings": settings}


def by_seed(content: dict, loss: str, factor: int, metric: str = "ndcg@10") -> dict[int, float]:
    """A metric at a factor, of the seeds that are there."""
    return {
        cell["cell"]["seed"]: cell["factors"][str(factor)][metric]
        for cell in content["cells"].values()
        if cell["cell"]["stage"] == loss
    }


def markdown(content: dict) -> str:
    """Vectors and nDCG@10 by factor: mean over the seeds, and their spread."""
    rows = []
    for factor in FACTORS:
        vectors = mean(by_seed(content, "contrastive", factor, "vectors").values())
        entries = [by_seed(content, loss, factor) for loss in LOSSES]
        entries = [f"{mean(each.values()):.4f} ({spread(each):.4f})" for each in entries]
        rows.append([str(factor), f"{vectors:,.0f}", *entries])
    return table(["factor", "vectors", *(f"nDCG@10 (spread), {title}" for title in TITLES.values())], rows)


def plot(content: dict, target: Path) -> None:
    """nDCG@10 by factor, with the spread of the seeds, beside the results file."""
    from benchmarks.harness.plots import COLOURS, Line, curves

    lines = []
    for (loss, title), colour in zip(TITLES.items(), (COLOURS[0], COLOURS[3]), strict=True):
        found = [[*by_seed(content, loss, factor).values()] for factor in FACTORS]
        points = [(factor, mean(each)) for factor, each in zip(FACTORS, found, strict=True)]
        lines.append(Line(title, colour, points, band=[(min(each), max(each)) for each in found]))
    axis = {"xlabel": "pool factor", "ylabel": "nDCG@10"}
    curves([(axis, lines)], target.with_suffix(".png"), "Cranfield, by pool factor")
