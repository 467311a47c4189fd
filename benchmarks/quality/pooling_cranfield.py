"""Training with each pooling on the Cranfield collection with a real small encoder: quality, gradients, robustness.

    python -m benchmarks.quality.pooling_cranfield --data FOLDER                # measure what is missing, print the table
    python -m benchmarks.quality.pooling_cranfield --data FOLDER --workers 4    # four processes share the GPU or the cores
    python -m benchmarks.quality.pooling_cranfield --render-only                # only the table of the results

all-MiniLM-L6-v2 with a projection to 128 dimensions, drawn from the seed, is trained on titles and texts of the collection
by PyLate's contrastive loss with `enable(pooling=...)`, in float32 and at PyLate's own temperature of 1. Nothing is trained
on the judged queries. They rank the whole collection before and after: with the pooling of the training and with the
maximum, in documents that are lengthened by token embeddings of documents that are relevant for no query, and in documents
that carry injected tokens. Gradient concentration is that of the callback, on the first 64 training pairs.

A cell is a pooling and a seed. It is written to the results file as soon as it is known; a finished one is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import Results, add_options, environment
from benchmarks.harness.workers import Worker, serve
from benchmarks.quality.cranfield import encoder_folder
from benchmarks.quality.pooling_cranfield_table import POOLINGS, markdown
from pylate_fastmaxsim import Max, TokenBatch
from pylate_fastmaxsim.ops.pooled import Pooling

PAIRS = 64  # of which gradient concentration is measured
# Of injected tokens, whose cosine with a token of the query is about 1 / sqrt(1 + noise**2): 0.89 and 0.55.
NOISES = (0.5, 1.5)
SETTINGS = {
    "steps": 88,  # two epochs
    "batch_size": 32,
    "learning_rate": 1e-4,
    "warmup_steps": 8,
    "document_length": 180,
    "query_length": 32,
    "embedding_size": 128,
}


def name_of(cell: dict[str, Any]) -> str:
    return f"{cell['pooling']}/seed={cell['seed']}"


def read_collection(data: Path) -> tuple[list[str], dict[str, list[str]], list[str], torch.Tensor]:
    """Texts of the documents, training pairs by column, judged queries, and grades ``[Nq, Nd]`` float32."""
    documents, asked = (
        [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("corpus", "queries")
    )
    places = {row["_id"]: place for place, row in enumerate(documents)}
    judged: dict[str, dict[int, int]] = {}
    with open(data / "qrels.tsv", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            if (grade := int(row["score"])) > 0:
                judged.setdefault(row["query-id"], {})[places[row["corpus-id"]]] = grade
    queries = [row["text"] for row in asked if row["_id"] in judged]
    grades = torch.zeros(len(queries), len(documents))
    for query, row in enumerate(row for row in asked if row["_id"] in judged):
        for place, grade in judged[row["_id"]].items():
            grades[query, place] = grade
    both = [row for row in documents if row["title"] and row["text"]]
    pairs = {"query": [row["title"] for row in both], "positive": [row["text"] for row in both]}
    return [f"{row['title']} {row['text']}".strip() for row in documents], pairs, queries, grades


def run(cell: dict[str, Any], data: Path, encoder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate a cell in this process."""
    import pylate_fastmaxsim
    from pylate_fastmaxsim.recipes.config.schema import ModelSection
    from pylate_fastmaxsim.recipes.models.load import load_model

    pooling, device = POOLINGS[cell["pooling"]], "cuda" if torch.cuda.is_available() else "cpu"
    documents, pairs, queries, grades = read_collection(data)
    section = ModelSection(
        name_or_path=str(encoder),
        **{key: settings[key] for key in ("embedding_size", "query_length", "document_length")},
        config_kwargs={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    began = time.monotonic()
    with pylate_fastmaxsim.enabled(pooling=pooling):
        model = load_model(section, device, cell["seed"])
        before = ranked(model, queries, documents, grades, pooling)
        history = train(model, pairs, pooling, cell["seed"], settings)
        trained = time.monotonic()
        after = ranked(model, queries, documents, grades, pooling)
        robust = robustness(model, queries, documents, grades, pooling)
    return {
        "before": before,
        "after": after,
        **history,
        **robust,
        "training_seconds": round(trained - began, 1),
        "seconds": round(time.monotonic() - began, 1),
    }


def scorings(pooling: Pooling) -> dict[str, Pooling]:
    """What a model is evaluated with: its own pooling, and the maximum, as indexes of others score."""
    return {"own": pooling, "max": Max()} if pooling != Max() else {"own": pooling}


def embedded(model, queries: list[str], documents: list[str]) -> tuple[TokenBatch, TokenBatch]:
    from pylate_fastmaxsim.recipes.models.encode import encode

    return encode(model, queries, 64, is_query=True), encode(model, documents, 64, is_query=False)


def ranked(model, queries, documents, grades, pooling) -> dict[str, dict[str, float]]:
    """nDCG@10 and Recall@1 over the whole collection, by scoring."""
    from pylate_fastmaxsim.diagnostics.robustness import length_sweep

    queries, documents = embedded(model, queries, documents)
    rows = length_sweep(queries, [(1, documents)], grades.to(model.device), [*scorings(pooling).values()])
    return {
        name: {key: row[key] for key in ("ndcg@10", "recall@1")}
        for name, row in zip(scorings(pooling), rows, strict=True)
    }


def train(model, pairs: dict[str, list[str]], pooling: Pooling, seed: int, settings: dict[str, Any]) -> dict[str, list]:
    """Losses, and gradient concentration every eighth of the training."""
    from datasets import Dataset
    from pylate import losses, utils
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    from pylate_fastmaxsim.recipes.trainers.callbacks import LogGradientConcentration

    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                seed=seed,
                max_steps=settings["steps"],
                per_device_train_batch_size=settings["batch_size"],
                learning_rate=settings["learning_rate"],
                warmup_steps=settings["warmup_steps"],
                batch_sampler="no_duplicates",
                dataloader_drop_last=True,
                use_cpu=model.device.type == "cpu",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict(pairs),
            loss=losses.Contrastive(model=model),
            data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
        )
        first = [texts[:PAIRS] for texts in pairs.values()]
        every = max(1, settings["steps"] // 8)
        trainer.add_callback(LogGradientConcentration(trainer, lambda: embedded(model, *first), every, pooling))
        trainer.train()
    history = trainer.state.log_history
    prefix = "gradient_concentration/"
    return {
        "losses": [round(entry["loss"], 5) for entry in history if "loss" in entry],
        "gradient_concentration": [
            {
                name.removeprefix(prefix): value
                for name, value in entry.items()
                if name.startswith(prefix) or name == "step"
            }
            for entry in history
            if f"{prefix}score_gini" in entry
        ],
    }


def robustness(model, queries, documents, grades, pooling) -> dict[str, list[dict[str, Any]]]:
    """nDCG@10 and Recall@1 against the length of documents and against injected tokens."""
    from pylate_fastmaxsim.diagnostics.injection import injection_sweep
    from pylate_fastmaxsim.diagnostics.robustness import length_sweep, lengthened

    names = {scoring: name for name, scoring in scorings(pooling).items()}
    grades = grades.to(model.device)
    queries, documents = embedded(model, queries, documents)
    # A filler that is gold for a query would make the document that it is appended to gold as well.
    neutral = (grades <= 0).all(dim=0).nonzero().flatten()
    place_of = {document: place for place, document in enumerate(neutral.tolist())}
    longer = lengthened(documents, documents.select(neutral), own=[place_of.get(i) for i in range(len(documents))])
    lengths = length_sweep(queries, longer, grades, [*names])
    injection = [
        {"noise": noise, **row}
        for noise in NOISES
        for row in injection_sweep(queries, documents, grades, [*names], noise=noise)
    ]
    return {
        name: [{**row, "pooling": names[row["pooling"]]} for row in rows]
        for name, rows in (("lengths", lengths), ("injection", injection))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "pooling_cranfield.json", timeout=1800.0)
    parser.add_argument("--data", type=Path, help="folder of the collection, in BEIR's layout")
    parser.add_argument("--encoder", type=Path, help="folder of all-MiniLM-L6-v2; by default that of its package")
    parser.add_argument("--poolings", nargs="+", choices=[*POOLINGS], default=[*POOLINGS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    for name in ("steps", "batch_size", "document_length"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=SETTINGS[name])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = {**SETTINGS, **{name: getattr(options, name) for name in SETTINGS if hasattr(options, name)}}
    kept = Results(options)
    if not options.render_only:
        if options.data is None:
            parser.error("--data is needed, unless with --render-only")
        encoder = options.encoder or encoder_folder()
        if options.worker:
            serve(lambda cell: {**run(cell, options.data, encoder, settings), "environment": environment()})
            return
        if kept.content.setdefault("settings", settings) != settings:
            sys.exit(f"{options.results} was made with other settings; choose another file with --results.")
        measure(kept, options)
    print("\n" + markdown(kept.cells))


def measure(kept: Results, options: argparse.Namespace) -> None:
    """Run the missing cells in --workers processes, each of which takes another cell when it has done one."""
    cells = [{"pooling": pooling, "seed": seed} for seed in options.seeds for pooling in options.poolings]
    cells = [cell for cell in cells if kept.wants(name_of(cell))]
    command = ["-m", "benchmarks.quality.pooling_cranfield", "--worker", *sys.argv[1:]]
    variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.workers))}
    free: SimpleQueue[Worker] = SimpleQueue()

    def answer_to(cell: dict[str, Any]) -> dict[str, Any] | None:
        worker = free.get()
        try:
            return worker.ask(cell) if kept.left > 0 else None
        finally:
            free.put(worker)

    with ExitStack() as stack, ThreadPoolExecutor(options.workers) as pool:
        for _ in range(options.workers):
            free.put(stack.enter_context(Worker(command, options.timeout, **variables)))
        running = {pool.submit(answer_to, cell): cell for cell in cells}
        for done in as_completed(running):
            cell, answer = running[done], done.result()
            if answer is None:  # the budget is spent
                continue
            failed = "failure" in answer
            shown = (
                answer["failure"]
                if failed
                else f"nDCG@10 {answer['after']['own']['ndcg@10']:.4f}, {answer['seconds']} s"
            )
            status = "failed" if failed else "ok"
            kept.add(name_of(cell), {"cell": cell, "status": status, **answer}, shown)


if __name__ == "__main__":
    main()
