"""Training steps of a MultiVectorEncoder of Sentence Transformers: stock, stock with FlashAttention, and this package.

    python -m benchmarks.training.multi_vector_step                       # measure what is missing, then print the table
    python -m benchmarks.training.multi_vector_step --mini-batch 32       # GradCache, in another results file
    python -m benchmarks.training.multi_vector_step --mini-batch 32 --mini-batch-tokens 9600   # mini-batches by tokens
    python -m benchmarks.training.multi_vector_step --batches 32 --layers 2   # a trial

Encoder, texts and optimizer are those of train_step.py: ModernBERT-base with random weights, documents of random words,
one negative per query, bf16 autocast. Sentence Transformers pads a batch to its longest text; with flash-attn it encodes
without padding itself. Without flash-attn, torch_flash_attention.py takes its place. Each cell runs in a process of its
own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import SWITCH, Results, add_options, environment
from benchmarks.harness.tables import table
from benchmarks.harness.timing import peaks_gib
from benchmarks.harness.turns import add_alone, gate, serve_by_turns, speed, step_times
from benchmarks.harness.workers import serve
from benchmarks.training.cell import DOCUMENT_LENGTH, make_rows, save_encoder
from benchmarks.training.cell_processes import steps_together
from benchmarks.training.torch_flash_attention import provide

PATHS = {
    "stock": "Sentence Transformers",
    "flash": "Sentence Transformers, flash_attention_2",
    "fast": "Sentence Transformers + pylate-fastmaxsim",
    "both": "Sentence Transformers, flash_attention_2 + pylate-fastmaxsim",
}


def run_cell(cell: dict) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        return _measured(cell, Path(directory))


def _measured(cell: dict, directory: Path) -> dict:
    import torch

    flash, fast = cell["path"] in ("flash", "both"), cell["path"] in ("fast", "both")
    kernels = provide(directory / "flash_attention") if flash else None

    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder import losses

    import pylate_fastmaxsim

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if fast:
        # Where Sentence Transformers removes padding itself, this package compiles nothing.
        pylate_fastmaxsim.enable(compile=cell["compile"] and not flash)
    attention = {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"} if flash else {}
    save_encoder(directory / "encoder", cell["layers"])
    model = MultiVectorEncoder(str(directory / "encoder"), device=str(device), model_kwargs=attention).train()
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=cuda)
    if cell["mini_batch"]:
        loss_function = losses.CachedMultiVectorMultipleNegativesRankingLoss(
            model, scale=50.0, mini_batch_size=cell["mini_batch"], mini_batch_num_tokens=cell["mini_batch_tokens"]
        )
    else:
        loss_function = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=50.0)

    def step(index: int) -> torch.Tensor:
        features = [
            {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in column.items()}
            for column in batches[index % len(batches)]
        ]
        # GradCache encodes again in the backward, which needs autocast too, as in the trainer.
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_function(features)
            if cell["mini_batch"]:
                loss.backward()
        if not cell["mini_batch"]:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    values = [step(index) for index in range(cell["warmup"])]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    measured = step_times(lambda index: values.append(step(index)), cell["warmup"], cell["steps"], cuda)
    times = [seconds * 1e3 for seconds in measured]
    masks = [column["attention_mask"] for columns in batches for column in columns[1:] if "attention_mask" in column]
    return {
        "status": "ok",
        "flash_attention": kernels,
        "step_ms": statistics.median(times),
        "each_ms": [round(each, 2) for each in times],
        "peak_gib": peaks_gib()[0] if cuda else None,
        "padding": 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks) if masks else None,
        # JSON has no NaN.
        "losses": [value if math.isfinite(value) else None for value in map(float, values)],
    }


def markdown_table(cells: dict[str, dict], rows: list[tuple]) -> str:
    """Step time and peak memory by batch, with the ratio to the first row; ``rows`` are results of :func:`row_of`."""
    batches = sorted({cell["batch"] for cell in cells.values()})
    lines = []
    for row in rows:
        entries = [title(*row)]
        for batch in batches:
            cell, first = (cells.get(cell_name(batch, *each), {"status": ""}) for each in (row, rows[0]))
            if cell["status"] != "ok":
                entries.append(cell["status"])
                continue
            memory = "" if cell["peak_gib"] is None else f", {cell['peak_gib']:.1f} GiB"
            ratio = f" ({speed(cell, first)})" if cell is not first and first["status"] == "ok" else ""
            entries.append(f"{cell['step_ms']:,.0f} ms{memory}{ratio}")
        lines.append(entries)
    return table(["", *(f"{batch:,} queries" for batch in batches)], lines)


def row_of(cell: dict) -> tuple[str, bool, int | None, int | None]:
    """Path, whether it is compiled, and GradCache's mini-batch in texts, or in tokens where that is given."""
    return cell["path"], cell["compile"], cell.get("mini_batch"), cell.get("mini_batch_tokens")


def title(path: str, compiled: bool, texts: int | None = None, tokens: int | None = None) -> str:
    divided = f", {tokens:,} tokens" if tokens else f", {texts:,} texts" if texts else ""
    return PATHS[path] + divided + ", `compile=True`" * compiled


def cell_name(batch: int, path: str, compiled: bool, texts: int | None = None, tokens: int | None = None) -> str:
    divided = f"/tokens={tokens}" if tokens else f"/texts={texts}" if texts else ""
    return f"{path}/batch={batch}/compile={int(compiled)}{divided}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, None, timeout=240)
    add_alone(parser)
    parser.add_argument("--mini-batch", type=int, help="measure GradCache with mini-batches of this many texts")
    parser.add_argument("--mini-batch-tokens", type=int, help="and of at most this many tokens, in place of texts")
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--compile", choices=list(SWITCH), default="both")
    parser.add_argument("--layers", type=int, help="fewer encoder layers, for a trial")
    parser.add_argument("--different", type=int, default=12, help="different batches, taken in turn")
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (serve_by_turns if gate() else serve)(run_cell)
        return
    options.results = options.results or RESULTS / f"multi_vector_{'gradcache' if options.mini_batch else 'step'}.json"
    results = Results(options, flat=True)
    keys = ("mini_batch", "mini_batch_tokens", "layers", "different", "warmup", "steps")
    how = {key: getattr(options, key) for key in keys}
    command = ["-m", "benchmarks.training.multi_vector_step", "--worker"]
    for compiled, batch in [] if options.render_only else itertools.product(SWITCH[options.compile], options.batches):
        choices = [{"path": path, "batch": batch, "compile": compiled, **how} for path in options.paths]
        cells = {name: cell for cell in choices if results.wants(name := cell_name(batch, *row_of(cell)))}
        for name, result in steps_together(command, cells, options.timeout, options.alone):
            shown = {key: result.get(key) for key in ("status", "step_ms", "peak_gib", "detail")}
            results.add(name, {**cells[name], **result, "environment": environment()}, shown)
    ordered = sorted(results.cells.values(), key=lambda cell: (cell["compile"], list(PATHS).index(cell["path"])))
    print(markdown_table(results.cells, list(dict.fromkeys(map(row_of, ordered)))))


if __name__ == "__main__":
    main()
