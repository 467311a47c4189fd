"""recipes/long_documents.yaml, stock and fast, with a substitute for its model and data that needs no network.

The encoder has the size of ModernBERT-base and random weights. Documents are concatenated docstrings of installed
libraries, of log-normal length; they have fewer words than articles because docstrings have more tokens per word::

    python -m benchmarks.training.long_documents --output runs/long
    python -m benchmarks.training.long_documents --output runs/long --sweep 8,16,32,64
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from benchmarks.harness.paths import ROOT
from pylate_fastmaxsim.comparison.report import RESULT_FILE, publish
from pylate_fastmaxsim.recipes.comparison.compare import compare
from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs
from pylate_fastmaxsim.recipes.load import load_recipe

RECIPE = ROOT / "recipes" / "long_documents.yaml"
PACKAGES = ["torch", "transformers", "numpy", "pandas", "scipy", "sklearn"]
WORDS, SPREAD = 1800, 0.6  # the median
SHAPES = {
    "base": "{vocab_size: 50368, hidden_size: 768, num_hidden_layers: 22, num_attention_heads: 12, intermediate_size: 1152}",
    "tiny": "{vocab_size: 2048, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}",
}


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
            row = {
                "anchor": pair["query"],
                "positive": document(pair["positive"]),
                "negative": document(other["positive"]),
            }
            lines.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the data and the results")
    parser.add_argument("--shape", choices=SHAPES, default="base", help="of the encoder")
    parser.add_argument("--rows", type=int, default=320, help="of the data")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sweep", default="", help="batch sizes to measure as well, for example 8,16,32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = arguments.output / "rows.jsonl"
    write_rows(rows, arguments.rows)
    overrides = [
        f"output_dir={arguments.output}",
        "model.name_or_path=null",
        f"model.build={SHAPES[arguments.shape]}",
        "model.embedding_size=128",
        "model.config_kwargs={}",
        f"data={{source: files, files: [{rows}], columns: [anchor, positive, negative]}}",
        f"training.per_device_train_batch_size={arguments.batch_size}",
        f"training.max_steps={arguments.steps}",
        "evaluation.rows=32",
        *arguments.set,
    ]
    recipe = load_recipe(RECIPE, overrides)
    comparison = compare(recipe, [int(size) for size in arguments.sweep.split(",") if size])
    publish(comparison, arguments.output / RESULT_FILE)


if __name__ == "__main__":
    main()
