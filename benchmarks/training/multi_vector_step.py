"""Training steps of a MultiVectorEncoder of Sentence Transformers: stock, stock with FlashAttention, and this package.

    python -m benchmarks multi_vector_step                       # measure what is missing, then print the table
    python -m benchmarks multi_vector_step --mini-batch 32       # GradCache, in another results file
    python -m benchmarks multi_vector_step --mini-batch 32 --mini-batch-tokens 9600   # mini-batches by tokens
    python -m benchmarks multi_vector_step --batches 32 --layers 2   # a trial

Encoder, texts and optimizer are those of train_step.py: ModernBERT-base with random weights, documents of random words,
one negative per query, bf16 autocast. Sentence Transformers pads a batch to its longest text; with flash-attn it encodes
without padding itself. Without flash-attn, torch_flash_attention.py takes its place. Each cell runs in a process of its
own.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

import torch

import pylate_fastmaxsim
from benchmarks.harness.timing import DEVICE
from benchmarks.training import steps
from benchmarks.training.encoder import DOCUMENT_LENGTH, make_rows, save_encoder
from benchmarks.training.steps import SWITCH, adamw, measured, padding, run, steps_table  # noqa: F401
from benchmarks.training.torch_flash_attention import provide

TIMEOUT = 480
PATHS = {
    "stock": "Sentence Transformers",
    "flash": "Sentence Transformers, flash_attention_2",
    "fast": "Sentence Transformers + pylate-fastmaxsim",
    "both": "Sentence Transformers, flash_attention_2 + pylate-fastmaxsim",
}


def measure(cell: dict) -> dict:
    folder = tempfile.TemporaryDirectory()
    flash, fast = cell["path"] in ("flash", "both"), cell["path"] in ("fast", "both")
    kernels = provide(Path(folder.name, "flash_attention")) if flash else None

    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder import losses

    if fast:
        # Where Sentence Transformers removes padding itself, this package compiles nothing.
        pylate_fastmaxsim.enable(compile=cell["compile"] and not flash)
    attention = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"} if flash else {}
    save_encoder(Path(folder.name), cell["layers"])
    model = MultiVectorEncoder(folder.name, device=str(DEVICE), model_kwargs=attention).train()
    if attention:
        # FlashAttention needs 16-bit weights only while the model is loaded.
        model.float()
    model[0].document_length = DOCUMENT_LENGTH
    draw = random.Random(0)

    def batch() -> list[dict]:
        columns = zip(*(row.values() for row in make_rows(cell["batch"], 1, "contrastive", draw)), strict=True)
        tasks = ["query", "document", "document"]
        pairs = zip(columns, tasks, strict=True)
        return [{**model.preprocess(list(texts), task=task), "task": task} for texts, task in pairs]

    batches = [batch() for _ in range(cell["different"])]
    if cell["compile"] and cell["path"] != "fast":
        model.compile(dynamic=True)
    if cell["mini_batch"]:
        loss_function = losses.CachedMultiVectorMultipleNegativesRankingLoss(
            model, scale=50.0, mini_batch_size=cell["mini_batch"], mini_batch_num_tokens=cell["mini_batch_tokens"]
        )
    else:
        loss_function = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=50.0)

    def loss_of(index: int) -> torch.Tensor:
        features = [
            {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in column.items()}
            for column in batches[index % len(batches)]
        ]
        # GradCache encodes again in the backward, which needs autocast too, as in the trainer.
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = loss_function(features)
            if cell["mini_batch"]:
                loss.backward()
                loss = loss.detach()
        return loss

    masks = [column["attention_mask"] for columns in batches for column in columns[1:] if "attention_mask" in column]
    return {**measured(loss_of, adamw(model.parameters()), cell), "flash_attention": kernels, "padding": padding(masks)}


def markdown_table(cells: dict[str, dict], rows: list[tuple]) -> str:
    """Step time and peak memory by batch, with the ratio to the first row; ``rows`` are results of :func:`row_of`."""
    batches = sorted({cell["batch"] for cell in cells.values()})
    titles = {row: title(*row) for row in rows}
    columns = {batch: f"{batch:,} queries" for batch in batches}
    return steps_table(cells, titles, columns, lambda row, batch: cell_name(batch, *row))


def row_of(cell: dict) -> tuple[str, bool, int | None, int | None]:
    """Path, whether it is compiled, and GradCache's mini-batch in texts, or in tokens where that is given."""
    return cell["path"], cell["compile"], cell.get("mini_batch"), cell.get("mini_batch_tokens")


def title(path: str, compiled: bool, texts: int | None = None, tokens: int | None = None) -> str:
    divided = f", {tokens:,} tokens" if tokens else f", {texts:,} texts" if texts else ""
    return PATHS[path] + divided + ", `compile=True`" * compiled


def cell_name(batch: int, path: str, compiled: bool, texts: int | None = None, tokens: int | None = None) -> str:
    divided = f"/tokens={tokens}" if tokens else f"/texts={texts}" if texts else ""
    return f"{path}/batch={batch}/compile={int(compiled)}{divided}"


def add_options(parser: argparse.ArgumentParser) -> None:
    steps.add_options(parser, PATHS, [64, 256], different=12, warmup=12, steps=16)
    parser.add_argument("--mini-batch", type=int, help="measure GradCache with mini-batches of this many texts")
    parser.add_argument("--mini-batch-tokens", type=int, help="and of at most this many tokens, in place of texts")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return step_cells(options, "mini_batch", "mini_batch_tokens", "layers", "different", "warmup", "steps")


def step_cells(options: argparse.Namespace, *keys: str) -> dict[str, dict]:
    """Cells of all batches and paths, not compiled first, with options by their keys."""
    how = {key: getattr(options, key) for key in keys}
    choices = itertools.product(SWITCH[options.compile], options.batches, options.paths)
    made = [{"path": path, "batch": batch, "compile": compiled, **how} for compiled, batch, path in choices]
    return {cell_name(cell["batch"], *row_of(cell)): cell for cell in made}


def markdown(content: dict) -> str:
    cells = content["cells"]
    ordered = sorted(cells.values(), key=lambda cell: (cell["compile"], list(PATHS).index(cell["path"])))
    return markdown_table(cells, list(dict.fromkeys(map(row_of, ordered))))
