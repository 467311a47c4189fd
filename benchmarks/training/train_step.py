"""Full training steps of ModernBERT-base: stock PyLate, PyLate with each fused-kernel peer, and this package.

    python -m benchmarks train_step                       # measure what is missing, then print the table
    python -m benchmarks train_step --batches 2 --layers 1 --compile no --steps 2 --warmup 1   # a trial, also on a CPU

A step is forward, contrastive loss, backward and AdamW in bf16 autocast, with one negative per query. The encoder has
random weights; texts are random words, and pass through PyLate's own tokenisation and collator. Each cell runs in a
process of its own. Stock and fast of a batch, not compiled, take turns with their steps, unless --alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import tempfile
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.lengths import MEAN_TOKENS
from benchmarks.training import steps
from benchmarks.training.encoder import DOCUMENT_LENGTH, ENCODERS, build_model, make_rows
from benchmarks.training.steps import SWITCH, adamw, draw_curves, measured, run, steps_table  # noqa: F401

TIMEOUT = 480
PATHS = {
    "stock": "PyLate",
    "lik": "PyLate + late-interaction-kernels",
    "flash": "PyLate + flash-maxsim",
    "fast": "PyLate + pylate-fastmaxsim",
}
# PYLATE_SCORES_BACKEND of each path.
SCORING = {"stock": "torch", "lik": "lik", "flash": "flash", "fast": "auto"}
TITLE = "One training step of ModernBERT-base"
BATCH_OF_BARS = 256


def add_options(parser: argparse.ArgumentParser) -> None:
    steps.add_options(parser, PATHS, [32, 64, 128, 256, 512, 1024], different=12, warmup=12, steps=24)
    parser.add_argument("--checkpointing", choices=list(SWITCH), default="both")
    add_step_options(parser)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What a step does, and how often."""
    losses = ["contrastive", "cached_contrastive", "distillation"]
    parser.add_argument("--loss", choices=losses, default=losses[0])
    parser.add_argument("--mini-batch", type=int, default=32, help="rows per mini-batch of GradCache")
    parser.add_argument("--tile", type=int, help="fill a batch with copies of this many rows")
    parser.add_argument("--negatives", type=int, default=1)
    parser.add_argument("--document-length", type=int, default=DOCUMENT_LENGTH)
    parser.add_argument("--encoder", choices=list(ENCODERS), default="modernbert")
    parser.add_argument("--warmup-rows", type=int, help="rows of a batch in steps before timing; by default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="stop timing after this long (5 steps at least)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, with a batch each; times are of the slowest rank")


STEP_KEYS = (
    *("loss", "mini_batch", "tile", "negatives", "document_length", "encoder", "layers"),
    *("different", "warmup", "warmup_rows", "steps", "seconds", "ranks"),
)


def step_of(options: argparse.Namespace) -> dict:
    """The keys of a cell of a suite of such steps; ``mean_tokens`` are of a document before it is truncated."""
    return {"mean_tokens": MEAN_TOKENS} | {key: getattr(options, key) for key in STEP_KEYS}


def cell_name(path: str, batch: int, compiled: bool, checkpointing: bool) -> str:
    return f"{path}/batch={batch}/compile={int(compiled)}/checkpointing={int(checkpointing)}"


def cells(options: argparse.Namespace) -> dict[str, dict]:
    choices = itertools.product(SWITCH[options.checkpointing], SWITCH[options.compile], options.batches, options.paths)
    step, made = step_of(options), {}
    for checkpointing, compiled, batch, path in choices:
        cell = {"path": path, "batch": batch, "compile": compiled, "checkpointing": checkpointing}
        made[cell_name(*cell.values())] = cell | step
    return made


def make_batch(collator, cell: dict, draw: random.Random) -> dict:
    """A collated batch; with ``tile`` copies of that many different rows."""
    rows = min(cell["tile"] or cell["batch"], cell["batch"])
    batch = collator(make_rows(rows, cell["negatives"], cell["loss"], draw, cell["mean_tokens"]))
    copies = -(-cell["batch"] // rows)

    def tiled(value):
        # A distillation column has several documents per row.
        return value.repeat(copies, 1)[: len(value) // rows * cell["batch"]]

    return {key: tiled(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def collect_features(batch: dict) -> tuple:
    """A feature dict for each column of a batch, and the labels, as the trainer splits it."""
    from sentence_transformers import SentenceTransformerTrainer

    return SentenceTransformerTrainer.collect_features(None, batch)


def largest_of_ranks(numbers: list[float]) -> list[float]:
    """The maximum over ranks of each number."""
    if not dist.is_initialized():
        return numbers
    largest = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def measure(cell: dict) -> dict:
    """The figures of a cell; of several ranks, those of the slowest."""
    if cell["ranks"] == 1:
        return measure_rank(0, cell)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_rank, (cell, folder), cell["ranks"])
        except torch.multiprocessing.ProcessRaisedException as error:
            if "OutOfMemoryError" in str(error):
                raise torch.OutOfMemoryError("CUDA out of memory") from error
            raise
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, cell: dict, folder: str) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(cell["ranks"])}
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, f"file://{folder}/group", rank=rank, world_size=cell["ranks"])
    result = measure_rank(rank, cell)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def measure_rank(rank: int, cell: dict) -> dict:
    os.environ["PYLATE_SCORES_BACKEND"] = SCORING[cell["path"]]
    from accelerate.utils import convert_outputs_to_fp32
    from pylate import losses, utils
    from torch.nn.parallel import DistributedDataParallel

    import pylate_fastmaxsim

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cell["path"] == "fast":
        pylate_fastmaxsim.enable(compile=cell["compile"])
    with tempfile.TemporaryDirectory() as directory:
        model = build_model(Path(directory), cell["layers"], cell["document_length"], cell["encoder"]).to(device)
    collator = utils.ColBERTCollator(tokenize_fn=model.tokenize)
    draw = random.Random(rank)
    batches = [make_batch(collator, cell, draw) for _ in range(cell["different"])]
    masks = [v for each in batches for k, v in each.items() if k.endswith("attention_mask") and "query" not in k]
    if cuda:
        pinned = torch.Tensor.pin_memory
        batches = [{k: pinned(v) if isinstance(v, torch.Tensor) else v for k, v in each.items()} for each in batches]
    model.train()
    if cell["checkpointing"]:
        model[0].auto_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = model
    if cell["ranks"] > 1:
        # As in the trainer.
        wrapped = DistributedDataParallel(model, device_ids=[device] if cuda else None, broadcast_buffers=False)
    if cell["compile"] and cell["path"] != "fast":
        wrapped = torch.compile(wrapped)
    options = {"temperature": 0.02, **({"gather_across_devices": True} if cell["ranks"] > 1 else {})}
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    if cell["loss"] == "cached_contrastive":
        # Stock encodes again inside backward(), where a context around the loss has ended. So autocast is around the
        # encoder alone and its embeddings become float32, as with bf16=True in the trainer.
        model.forward = convert_outputs_to_fp32(autocast(model.forward))
        autocast = contextlib.nullcontext()
        loss_function = losses.CachedContrastive(wrapped, mini_batch_size=cell["mini_batch"], **options)
    elif cell["loss"] == "distillation":
        loss_function = losses.Distillation(wrapped)
    else:
        loss_function = losses.Contrastive(model=wrapped, **options)

    def loss_of(index: int) -> torch.Tensor:
        rows = cell["warmup_rows"] if index < cell["warmup"] else None
        batch = {
            key: value[:rows].to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in batches[index % len(batches)].items()
        }
        with autocast:
            return loss_function(*collect_features(batch))

    # All ranks must make the same number of steps.
    timed = {**cell, "seconds": None} if cell["ranks"] > 1 else cell
    result = measured(loss_of, adamw(model.parameters()), timed, largest_of_ranks)
    return {
        **result,
        "live_document_tokens": sum(int(mask.sum()) for mask in masks) / len(batches),
        "padded_document_tokens": cell["batch"] * (1 + cell["negatives"]) * cell["document_length"],
    }


def row_title(path: str, compiled: bool) -> str:
    if not compiled:
        return PATHS[path]
    return PATHS[path] + (", `compile=True`" if path == "fast" else " + torch.compile")


def markdown_table(cells: dict, checkpointing: bool) -> str:
    """Step time and peak memory by path and batch, with the ratio to stock of the same batch."""
    batches = sorted({cell["batch"] for cell in cells.values() if cell["checkpointing"] == checkpointing})

    def name(row: tuple[bool, str], batch: int) -> str:
        return cell_name(row[1], batch, row[0], checkpointing)

    rows = itertools.product([False, True], PATHS)
    rows = {row: row_title(row[1], row[0]) for row in rows if any(name(row, batch) in cells for batch in batches)}
    return steps_table(cells, rows, {batch: f"batch {batch}" for batch in batches}, name, "path", marked=True)


def markdown(content: dict) -> str:
    cells = content["cells"]
    return "\n\n".join(
        f"Gradient checkpointing: {'on' if checkpointing else 'off'}\n\n{markdown_table(cells, checkpointing)}"
        for checkpointing in (False, True)
        if any(cell["checkpointing"] == checkpointing for cell in cells.values())
    )


def plot(content: dict, target: Path) -> None:
    """Bars of the batch that the README shows, and curves over batch sizes with gradient checkpointing."""
    from benchmarks.harness.plots import COLOURS, bars

    cells, paths = content["cells"].values(), dict(zip(PATHS, COLOURS, strict=True))
    shown = {
        row_title(path, compiled).replace("`", ""): (paths[path], cell)
        for path, compiled in [*((path, False) for path in PATHS), ("stock", True), ("fast", True)]
        if (cell := content["cells"].get(cell_name(path, BATCH_OF_BARS, compiled, False)))
    }
    if len(shown) > 1:
        panels = {
            label: [(name, colour, cell[key]) for name, (colour, cell) in shown.items() if cell.get(key)]
            for key, label in steps.MEASURES.items()
        }
        bars(panels, target.with_suffix(".png"), f"{TITLE}, {BATCH_OF_BARS} queries")
    batches = sorted({cell["batch"] for cell in cells if cell["checkpointing"]})
    if len(batches) > 1:
        curves = {}
        for (path, colour), compiled in itertools.product(paths.items(), (False, True)):
            of_curve = (path, compiled, True)
            found = [
                (each["batch"], each)
                for each in cells
                if (each["path"], each["compile"], each["checkpointing"]) == of_curve
            ]
            curves[row_title(path, compiled)] = (colour, "o--" if compiled else "o-", sorted(found, key=itemgetter(0)))
        scales = {"xlabel": "batch size (queries)", "xscale": "log", "yscale": "log", "xticks": batches}
        file = target.with_name(target.stem + "_checkpointing.png")
        draw_curves(curves, file, TITLE + ", with gradient checkpointing", **scales)
