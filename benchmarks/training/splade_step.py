"""Training steps of a SparseEncoder (SPLADE) of Sentence Transformers: stock and this package, compiled and not.

    python -m benchmarks splade_step                              # measure what is missing, then print the table
    python -m benchmarks splade_step --compile no --batches 128   # some cells
    python -m benchmarks splade_step --batches 4 --layers 1 --hidden 64 --steps 2   # a trial, also on a CPU

BERT in its base size with random weights and without dropout, under SpladeLoss with SparseMultipleNegativesRankingLoss:
forward, backward and AdamW in bf16 autocast. Queries have 10 random words on average; documents, one negative for each
query, 80 tokens, at most 256. Sentence Transformers' collator pads a column to its longest text, and its trainer brings
batches to the GPU, before the clock runs. Stock is compiled as TrainingArguments(torch_compile=True) do it:
torch.compile of the whole model. Each cell runs in a process of its own, and one that is out of memory is a result.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch

import pylate_fastmaxsim
from benchmarks.harness.lengths import log_normal
from benchmarks.harness.timing import DEVICE
from benchmarks.training import steps
from benchmarks.training.encoder import save_encoder, words
from benchmarks.training.multi_vector_step import markdown_table, step_cells
from benchmarks.training.steps import adamw, measured, padding, run  # noqa: F401

TIMEOUT = 480
PATHS = ("stock", "fast")
QUERY_TOKENS, DOCUMENT_TOKENS, LONGEST = 10, 80, 256


def measure(cell: dict) -> dict:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, losses
    from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
    from sentence_transformers.sparse_encoder.training_args import SparseEncoderTrainingArguments

    if cell["path"] == "fast":
        pylate_fastmaxsim.enable(compile=cell["compile"])
    folder = tempfile.TemporaryDirectory()
    save_encoder(Path(folder.name), cell["layers"], "bert", masked_lm=True, hidden=cell["hidden"])
    model = SparseEncoder(folder.name, device=str(DEVICE)).train()
    model.max_seq_length = LONGEST
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    collate = SparseEncoderDataCollator(getattr(model, "preprocess", model.tokenize))
    draw = random.Random(0)
    means = {"query": QUERY_TOKENS, "positive": DOCUMENT_TOKENS, "negative": DOCUMENT_TOKENS}

    def row() -> dict:
        return {name: words(log_normal(mean, draw) - 2, draw) for name, mean in means.items()}  # and [CLS], [SEP]

    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss_function = losses.SpladeLoss(model, ranking, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5)
    arguments = SparseEncoderTrainingArguments(f"{folder.name}/run", report_to="none", use_cpu=DEVICE.type == "cpu")
    trainer = SparseEncoderTrainer(model, arguments, loss=ranking)
    # On the GPU before the clock runs.
    batches = [
        trainer._prepare_inputs(collate([row() for _ in range(cell["batch"])])) for _ in range(cell["different"])
    ]
    if cell["compile"] and cell["path"] == "stock":
        # As the trainer, which builds the loss first.
        loss_function.model = ranking.model = torch.compile(model)

    def loss_of(index: int) -> torch.Tensor:
        features, _ = trainer.collect_features(batches[index % len(batches)])
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = loss_function(features, None)
        return sum(loss.values()) if isinstance(loss, dict) else loss

    masks = [value for columns in batches for key, value in columns.items() if key.endswith("attention_mask")]
    return {**measured(loss_of, adamw(model.parameters()), cell), "padding": padding(masks)}


def add_options(parser: argparse.ArgumentParser) -> None:
    steps.add_options(parser, PATHS, [128, 32, 256, 64, 16, 8], different=6, warmup=6, steps=12)
    parser.add_argument("--hidden", type=int, help="a smaller encoder, for a trial: a multiple of 64")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    return step_cells(options, "layers", "hidden", "different", "warmup", "steps")


def markdown(content: dict) -> str:
    """Stock and this package, not compiled and compiled, by batch; speed is relative to stock that is not compiled."""
    return markdown_table(content["cells"], [(path, compiled) for compiled in (False, True) for path in PATHS])
