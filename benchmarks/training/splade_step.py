"""Training steps of a SparseEncoder (SPLADE) of Sentence Transformers: stock and this package, compiled and not.

    python -m benchmarks.training.splade_step                              # measure what is missing, then print the table
    python -m benchmarks.training.splade_step --compile no --batches 128   # some cells
    python -m benchmarks.training.splade_step --batches 4 --layers 1 --hidden 64 --steps 2   # a trial, also on a CPU

BERT in its base size with random weights and without dropout, under SpladeLoss with SparseMultipleNegativesRankingLoss:
forward, backward and AdamW in bf16 autocast. Queries have 10 random words on average; documents, one negative for each
query, 80 tokens, at most 256. Sentence Transformers' collator pads a column to its longest text, and its trainer brings batches to
the GPU, before the clock runs. Stock is compiled as TrainingArguments
(torch_compile=True) do it: torch.compile of the whole model. Each cell runs in a process of its own, and one that is out
of memory is a result.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import SWITCH, Results, add_options, environment
from benchmarks.harness.timing import peaks_gib
from benchmarks.harness.turns import add_alone, gate, serve_by_turns, step_times
from benchmarks.harness.workers import serve
from benchmarks.training.cell import VOCABULARY, save_encoder
from benchmarks.training.cell_processes import steps_together
from benchmarks.training.multi_vector_step import cell_name, markdown_table

PATHS = ("stock", "fast")
QUERY_TOKENS, DOCUMENT_TOKENS, LONGEST = 10, 80, 256


def run_cell(cell: dict) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        return _measured(cell, Path(directory))


def text(mean: float, draw: random.Random) -> str:
    words = max(1, log_normal(mean, draw) - 2)  # beside [CLS] and [SEP]
    return " ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(words))


def _measured(cell: dict, directory: Path) -> dict:
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, losses
    from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
    from sentence_transformers.sparse_encoder.training_args import SparseEncoderTrainingArguments

    import pylate_fastmaxsim

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cell["path"] == "fast":
        pylate_fastmaxsim.enable(compile=cell["compile"])
    save_encoder(directory, cell["layers"], "bert", masked_lm=True, **sizes(cell["hidden"]))
    model = SparseEncoder(str(directory), device=str(device)).train()
    model.max_seq_length = LONGEST
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    collate = SparseEncoderDataCollator(getattr(model, "preprocess", model.tokenize))
    draw = random.Random(0)
    means = {"query": QUERY_TOKENS, "positive": DOCUMENT_TOKENS, "negative": DOCUMENT_TOKENS}

    def batch() -> dict:
        return collate([{name: text(mean, draw) for name, mean in means.items()} for _ in range(cell["batch"])])

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=cuda)
    ranking = losses.SparseMultipleNegativesRankingLoss(model)
    loss_function = losses.SpladeLoss(model, ranking, document_regularizer_weight=3e-5, query_regularizer_weight=5e-5)
    arguments = SparseEncoderTrainingArguments(str(directory / "run"), report_to="none", use_cpu=not cuda)
    trainer = SparseEncoderTrainer(model, arguments, loss=ranking)
    # On the GPU before the clock runs.
    batches = [trainer._prepare_inputs(batch()) for _ in range(cell["different"])]
    if cell["compile"] and cell["path"] == "stock":
        # As the trainer, which builds the loss first.
        loss_function.model = ranking.model = torch.compile(model)

    def step(index: int) -> torch.Tensor:
        features, _ = trainer.collect_features(batches[index % len(batches)])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_function(features, None)
        total = sum(loss.values()) if isinstance(loss, dict) else loss
        total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.detach()

    began = time.perf_counter()
    values = [step(index) for index in range(cell["warmup"])]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    warmup_seconds = time.perf_counter() - began
    measured = step_times(lambda index: values.append(step(index)), cell["warmup"], cell["steps"], cuda)
    times = [seconds * 1e3 for seconds in measured]
    masks = [value for columns in batches for key, value in columns.items() if key.endswith("attention_mask")]
    return {
        "status": "ok",
        "step_ms": statistics.median(times),
        "each_ms": [round(each, 2) for each in times],
        "peak_gib": peaks_gib()[0] if cuda else None,
        "warmup_seconds": warmup_seconds,
        "padding": 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks),
        # JSON has no NaN.
        "losses": [value if math.isfinite(value) else None for value in map(float, values)],
    }


def sizes(hidden: int | None) -> dict:
    """What an encoder of another hidden size has besides, for a trial."""
    if hidden is None:
        return {}
    return {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": max(1, hidden // 64)}


def steps_table(cells: dict) -> str:
    """Stock and this package, not compiled and compiled, by batch; speed is relative to stock that is not compiled."""
    return markdown_table(cells, [(path, compiled) for compiled in (False, True) for path in PATHS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "splade_step.json", timeout=240)
    add_alone(parser)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 32, 256, 64, 16, 8])
    parser.add_argument("--compile", choices=list(SWITCH), default="both")
    parser.add_argument("--layers", type=int, help="fewer encoder layers, for a trial")
    parser.add_argument("--hidden", type=int, help="a smaller encoder, for a trial: a multiple of 64")
    parser.add_argument("--different", type=int, default=6, help="different batches, taken in turn")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (serve_by_turns if gate() else serve)(run_cell)
        return
    results = Results(options, flat=True)
    how = {key: getattr(options, key) for key in ("layers", "hidden", "different", "warmup", "steps")}
    command = ["-m", "benchmarks.training.splade_step", "--worker"]
    for compiled, batch in [] if options.render_only else itertools.product(SWITCH[options.compile], options.batches):
        cells = {
            name: {"path": path, "batch": batch, "compile": compiled, **how}
            for path in options.paths
            if results.wants(name := cell_name(batch, path, compiled))
        }
        for name, result in steps_together(command, cells, options.timeout, options.alone):
            shown = {key: result.get(key) for key in ("status", "step_ms", "peak_gib", "warmup_seconds", "detail")}
            shown["first_loss"] = result.get("losses", [None])[0]
            results.add(name, {**cells[name], **result, "environment": environment()}, shown)
    print(steps_table(results.cells))


if __name__ == "__main__":
    main()
