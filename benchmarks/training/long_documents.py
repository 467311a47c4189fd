"""recipes/long_documents.yaml, stock and fast, with a substitute for its model and data that needs no network.

    python -m benchmarks long_documents --batches 16 --work runs/long
    python -m benchmarks long_documents --batches 2 --tiny --results /tmp/long.json    # a trial, also on a CPU

The encoder has the size of ModernBERT-base and random weights. Documents are concatenated docstrings of installed
libraries, of log-normal length; they have fewer words than articles because docstrings have more tokens per word. A cell
is a comparison of `fastmaxsim compare`, without its report.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.paths import ROOT
from pylate_fastmaxsim.recipes.comparison.compare import compare
from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs
from pylate_fastmaxsim.recipes.load import load_recipe

PACKAGES = ["torch", "transformers", "numpy", "pandas", "scipy", "sklearn"]
WORDS, SPREAD = 1800, 0.6  # the median
ROWS = 320
BASE = "{vocab_size: 50368, hidden_size: 768, num_hidden_layers: 22, num_attention_heads: 12, intermediate_size: 1152}"
TINY = "{vocab_size: 2048, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}"


def write_rows(file: Path, count: int) -> None:
    """(anchor, positive, negative) rows; a positive begins with the answer to its query."""
    generator = random.Random(0)
    pairs = docstring_pairs(PACKAGES, limit=20_000)
    words = " ".join(pair["positive"] for pair in pairs).split()

    def document(beginning: str) -> str:
        length = round(generator.lognormvariate(0, SPREAD) * WORDS)
        start = generator.randrange(len(words) - length)
        return " ".join([*beginning.split(), *words[start : start + length]])

    with open(file, "w", encoding="utf-8") as lines:
        for pair, other in zip(pairs[:count], pairs[count : 2 * count], strict=True):
            documents = {"positive": document(pair["positive"]), "negative": document(other["positive"])}
            lines.write(json.dumps({"anchor": pair["query"], **documents}) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, default=Path("runs/long_documents"), help="folder for data and runs")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small encoder, for a trial")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return {str(batch): {"batch": batch, "steps": options.steps, "tiny": options.tiny} for batch in options.batches}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    rows = options.work / "rows.jsonl"
    if cells:
        options.work.mkdir(parents=True, exist_ok=True)
        write_rows(rows, ROWS)
    for name, cell in cells.items():
        overrides = [
            f"output_dir={options.work / name}",
            "model.name_or_path=null",
            f"model.build={TINY if cell['tiny'] else BASE}",
            "model.embedding_size=128",
            "model.config_kwargs={}",
            f"data={{source: files, files: [{rows}], columns: [anchor, positive, negative]}}",
            f"training.per_device_train_batch_size={cell['batch']}",
            f"training.max_steps={cell['steps']}",
            "evaluation.rows=8",
        ]
        yield name, compare(load_recipe(ROOT / "recipes" / "long_documents.yaml", overrides))
