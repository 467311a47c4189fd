"""One cell of training steps, in a process of its own: build, warm up, measure, print JSON.

The encoder is ModernBERT-base, or another --encoder in its published size, with random weights: speed and memory do not
depend on their values. Texts are random words, with log-normal lengths like those of MS MARCO passages, and pass
through PyLate's own tokenisation and collator.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.lengths import MEAN_TOKENS, log_normal
from benchmarks.harness.timing import peaks_gib
from benchmarks.harness.turns import gate, send_by_turns, step_times
from benchmarks.harness.workers import send_result
from benchmarks.training.step_kernels import step_kernels

QUERY_LENGTH = 32
DOCUMENT_LENGTH = 300
SPECIAL_TOKENS = 3  # [CLS], the document prefix and [SEP]
VOCABULARY = 30_000
# Published sizes: EuroBERT-210m and Qwen3-Embedding-0.6B. The defaults of the others are their base.
ENCODERS = {
    "modernbert": {},
    "bert": {},
    "mpnet": {},
    "eurobert": {
        "vocab_size": 128_256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "qwen3": {
        "vocab_size": 151_669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
# PYLATE_SCORES_BACKEND of each path.
SCORING = {"stock": "torch", "lik": "lik", "flash": "flash", "fast": "auto"}


def save_encoder(
    directory: Path, layers: int | None, encoder: str = "modernbert", masked_lm: bool = False, **sizes: int
) -> None:
    """An encoder with random weights and a word-level tokenizer; ``masked_lm``: with the head that predicts words."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers import models as token_models
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(VOCABULARY))])}
    tokenizer = Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    ).save_pretrained(directory)
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    ids |= {"cls_token_id": 2, "sep_token_id": 3} if encoder == "modernbert" else {}
    config = AutoConfig.for_model(encoder, **ENCODERS[encoder], **ids, **sizes)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    (AutoModelForMaskedLM if masked_lm else AutoModel).from_config(config).save_pretrained(directory)


def build_model(directory: Path, layers: int | None, document_length: int, encoder: str = "modernbert"):
    """A PyLate model around such an encoder."""
    from pylate import models

    save_encoder(directory, layers, encoder)
    return models.ColBERT(
        model_name_or_path=str(directory),
        query_length=QUERY_LENGTH,
        document_length=document_length,
        skiplist_words=[],
        device="cpu",
    )


def make_rows(
    count: int, negatives: int, loss: str, draw: random.Random, mean_tokens: float = MEAN_TOKENS
) -> list[dict]:
    """Rows of random words: a query, a positive and negatives. Documents have ``mean_tokens`` on average.

    For distillation the documents are in one column, with a teacher score for each.
    """

    def text(words: int) -> str:
        return " ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(max(words, 1)))

    def document() -> str:
        return text(log_normal(mean_tokens - SPECIAL_TOKENS, draw))

    def row() -> dict:
        query, documents = text(draw.randint(4, 12)), [document() for _ in range(1 + negatives)]
        if loss == "distillation":
            return {"query": query, "documents": documents, "scores": [draw.random() for _ in documents]}
        columns = ["positive", *(f"negative_{i}" for i in range(negatives))]
        return {"query": query, **dict(zip(columns, documents, strict=True))}

    return [row() for _ in range(count)]


def make_batch(collator, options: argparse.Namespace, draw: random.Random) -> dict:
    """A collated batch; with ``--tile`` copies of that many different rows."""
    if options.tile is None or options.tile >= options.batch:
        return collator(make_rows(options.batch, options.negatives, options.loss, draw, options.mean_tokens))
    batch = collator(make_rows(options.tile, options.negatives, options.loss, draw, options.mean_tokens))
    copies = -(-options.batch // options.tile)

    def tiled(value):
        # A distillation column has several documents per row.
        return value.repeat(copies, 1)[: len(value) // options.tile * options.batch]

    return {key: tiled(value) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def collect_features(batch: dict) -> tuple:
    """A feature dict for each column of a batch, and the labels, as the trainer splits it."""
    from sentence_transformers import SentenceTransformerTrainer

    return SentenceTransformerTrainer.collect_features(None, batch)


def wait_for_turn(options: argparse.Namespace, rank: int) -> float:
    """Wait for other cells to warm up and to be measured (see cell_processes.py), and return the seconds."""
    began = time.perf_counter()
    if options.wait_for_turn:
        largest_of_ranks(options, [0.0])  # all are warm
        if rank == 0:
            print("READY", flush=True)
            sys.stdin.readline()
        largest_of_ranks(options, [0.0])
    return time.perf_counter() - began


def largest_of_ranks(options: argparse.Namespace, numbers: list[float]) -> list[float]:
    """The maximum over ranks of each number. Waits on the CPU, since a waiting NCCL call keeps the GPU busy."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    if options.ranks > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


class _Scored(Exception):
    """The chunks of scores asked for were made."""


def stop_after_chunks(count: int) -> None:
    """End a step of GradCache while it scores, when a large batch is at its peak memory."""
    from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses

    sum_of_losses, made = pylate_losses._sum_of_losses, itertools.count()

    def counted(*arguments):
        if next(made) == count:
            raise _Scored
        return sum_of_losses(*arguments)

    pylate_losses._sum_of_losses = counted


def run_cell(options: argparse.Namespace) -> dict:
    os.environ["PYLATE_SCORES_BACKEND"] = SCORING[options.path]
    from accelerate.utils import convert_outputs_to_fp32
    from pylate import losses, utils
    from torch.nn.parallel import DistributedDataParallel

    import pylate_fastmaxsim

    cuda = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"]) if options.ranks > 1 else 0
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if options.ranks > 1:
        if cuda:
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    if options.path == "fast":
        pylate_fastmaxsim.enable(compile=options.compile)
    with tempfile.TemporaryDirectory() as directory:
        model = build_model(Path(directory), options.layers, options.document_length, options.encoder)
        model = model.to(device)
    collator = utils.ColBERTCollator(tokenize_fn=model.tokenize)
    draw = random.Random(rank)
    batches = [make_batch(collator, options, draw) for _ in range(options.batches)]
    live = [sum(int(batch[key].sum()) for key in batch if key.endswith("attention_mask")) for batch in batches]
    documents = [
        sum(int(batch[key].sum()) for key in batch if key.endswith("attention_mask") and "query" not in key)
        for batch in batches
    ]
    if cuda:
        batches = [
            {k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in batch.items()} for batch in batches
        ]
    model.train()
    if options.checkpointing:
        model[0].auto_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=cuda)
    wrapped = model
    if options.ranks > 1:
        # As in the trainer.
        wrapped = DistributedDataParallel(model, device_ids=[device] if cuda else None, broadcast_buffers=False)
    if options.compile and options.path != "fast":
        wrapped = torch.compile(wrapped)
    gathered = {"gather_across_devices": True} if options.ranks > 1 else {}
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    if options.loss == "cached_contrastive":
        # Stock encodes again inside backward(), where a context around the loss has ended. So autocast is around the
        # encoder alone and its embeddings become float32, as with bf16=True in the trainer.
        model.forward = convert_outputs_to_fp32(autocast(model.forward))
        autocast = contextlib.nullcontext()
        loss_function = losses.CachedContrastive(
            wrapped, mini_batch_size=options.mini_batch, temperature=0.02, **gathered
        )
    elif options.loss == "distillation":
        loss_function = losses.Distillation(wrapped)
    else:
        loss_function = losses.Contrastive(model=wrapped, temperature=0.02, **gathered)

    def step(batch: dict) -> torch.Tensor:
        batch = {k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        with autocast:
            loss = loss_function(*collect_features(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses_seen = []
    waited = 0.0
    began = time.perf_counter()
    for index in range(options.warmup):
        if index == options.warmup - 1:
            synchronize()
            waited = wait_for_turn(options, rank)  # before the last step, which wakes the idle GPU
        batch = batches[index % len(batches)]
        losses_seen.append(step({k: v[: options.warmup_rows] if hasattr(v, "shape") else v for k, v in batch.items()}))
    synchronize()
    warmup_seconds = time.perf_counter() - began - waited
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    if options.chunks is not None:
        stop_after_chunks(options.chunks)
        with contextlib.suppress(_Scored):
            step(batches[0])
            raise ValueError(f"A step has no more than {options.chunks} chunks.")
        return {"status": "ok", "chunks": options.chunks, "peak_gib": peaks_gib()[0]}
    # All ranks must make the same number of steps.
    limit = options.seconds if options.ranks == 1 else math.inf
    times = step_times(
        lambda index: losses_seen.append(step(batches[index % len(batches)])),
        options.warmup,
        options.steps,
        cuda,
        limit,
    )
    times = largest_of_ranks(options, times)
    peak, reserved = largest_of_ranks(options, peaks_gib() if cuda else [0.0, 0.0])
    by_kernel = {}
    if options.kernels and cuda:
        by_kernel = step_kernels(lambda index: step(batches[index % len(batches)]))
    return {
        "status": "ok",
        "timing": "CUDA events" if cuda else "host clock",
        "step_ms": statistics.median(times) * 1e3,
        "step_ms_min": min(times) * 1e3,
        "step_ms_max": max(times) * 1e3,
        "steps": len(times),
        "each_ms": [round(seconds * 1e3, 2) for seconds in times],
        "peak_gib": peak if cuda else None,
        "peak_reserved_gib": reserved if cuda else None,
        "warmup_seconds": warmup_seconds,
        "live_tokens": statistics.mean(live),
        "live_document_tokens": statistics.mean(documents),
        "padded_document_tokens": options.batch * (1 + options.negatives) * options.document_length,
        "losses": [float(loss) for loss in losses_seen],
        **by_kernel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=list(SCORING), required=True)
    parser.add_argument("--loss", choices=["contrastive", "cached_contrastive", "distillation"], default="contrastive")
    parser.add_argument("--mini-batch", type=int, default=32, help="rows per mini-batch of GradCache")
    parser.add_argument("--tile", type=int, help="fill a batch with copies of this many rows")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="profile steps after the timing: their kernels")
    parser.add_argument("--negatives", type=int, default=1)
    parser.add_argument("--document-length", type=int, default=DOCUMENT_LENGTH)
    parser.add_argument("--mean-tokens", type=float, default=MEAN_TOKENS, help="per document, before truncation")
    parser.add_argument("--encoder", choices=list(ENCODERS), default="modernbert")
    parser.add_argument("--layers", type=int, help="fewer encoder layers, for a trial")
    parser.add_argument("--batches", type=int, default=12, help="different batches, taken in turn")
    parser.add_argument("--warmup", type=int, help="steps before timing, at least one; by default each batch once")
    parser.add_argument("--warmup-rows", type=int, help="rows of a batch in steps before timing; by default all")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--wait-for-turn", action="store_true", help="print READY when warm, then wait for a line of input"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="stop timing after this long (5 steps at least)")
    parser.add_argument(
        "--chunks", type=int, help="only the memory of a GradCache step, which ends after this many chunks of scores"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="GPUs under DistributedDataParallel, with negatives of all ranks and a batch each; times are of the slowest rank",
    )
    options = parser.parse_args()
    if options.warmup is None:
        # Every batch once, so that the allocator need not ask for memory later.
        options.warmup = options.batches
    if options.warmup < 1:
        parser.error("--warmup must be at least 1")
    if options.ranks < 1:
        parser.error("--ranks must be at least 1")
    if not options.mean_tokens > SPECIAL_TOKENS:
        parser.error(f"--mean-tokens must be more than {SPECIAL_TOKENS}, the special tokens of a document")
    if options.chunks is not None and (options.path, options.loss) != ("fast", "cached_contrastive"):
        parser.error("--chunks goes with --path fast and --loss cached_contrastive")
    if options.ranks > 1 and "LOCAL_RANK" not in os.environ:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        os.execv(
            sys.executable, [sys.executable, "-m", *launcher, "--module", "benchmarks.training.cell", *sys.argv[1:]]
        )
    try:
        result = run_cell(options)
    except torch.OutOfMemoryError as error:
        result = {"status": "out of memory", "detail": str(error).split(". ")[0]}
    if gate():
        send_by_turns(result)
    elif result["status"] != "ok" or os.environ.get("LOCAL_RANK", "0") == "0":
        send_result(result)
    if options.ranks > 1:
        if result["status"] != "ok":
            os._exit(1)  # the launcher then ends the other ranks, which wait for this one
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
