"""``encode`` of the hosts, stock and with the flag: texts a second, peak memory, and distance from float32.

    python -m benchmarks encode                                    # of the hosts that are installed
    python -m benchmarks encode --only 'pylate/*' --texts 20000    # some cells
    python -m benchmarks encode --texts 200 --layers 2 --hidden 64   # a trial, also on a CPU

ModernBERT-base in random weights for late interaction, BERT-base for SPLADE. Documents of random words have 80 tokens on
average and at most 300, queries 8. Results come to the host as stock gives them: arrays of PyLate, tensors of a
MultiVectorEncoder (convert_to_numpy=True) and of a SparseEncoder (save_to_cpu=True). A cell is a process; the clock runs
over one call for all texts, after one for 512. Stock at its defaults encodes fewer texts, since its rate does not depend
on their number. ``busy`` is the time of all kernels over that of a call for
2,048 texts. ``distance`` is the largest of
1 - cosine of a token's (SPLADE: a text's) vector and that of stock in float32, over 256 texts; ``mean_distance`` the mean.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.tables import table, times
from benchmarks.training.encoder import DOCUMENT_LENGTH, VOCABULARY, save_encoder
from benchmarks.training.splade_step import sizes

TIMEOUT = 300
HOSTS = {
    "pylate": "pylate",
    "multi_vector": "sentence_transformers.multi_vector_encoder",
    "sparse": "sentence_transformers",
}
# What encodes, in which dtype, and batch_size.
WAYS = ("stock float32 32", "stock bfloat16 32", "stock bfloat16 256", "fast float32 32", "fast bfloat16 32")
WAYS += ("fast bfloat16 256", "compiled bfloat16 256")
QUERY_TOKENS, DOCUMENT_TOKENS = 8, 80
WARM_UP, COMPARED, PROFILED, FEWER = 512, 256, 2048, 4000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--hidden", type=int, help="a smaller encoder, for a trial: a multiple of 64")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    for host, what, way in itertools.product(filter(_found, HOSTS), ("documents", "queries"), WAYS):
        path, dtype, batch = way.split()
        if what == "documents" or (batch == "256" and host != "sparse"):
            texts = min(FEWER, options.texts) if path == "stock" and batch == "32" else options.texts
            made[f"{host}/{what}/{way}"] = {"host": host, "what": what, "path": path, "dtype": dtype, "texts": texts}
            made[f"{host}/{what}/{way}"] |= {"batch": int(batch), "layers": options.layers, "hidden": options.hidden}
    return made


def _found(host: str) -> bool:
    try:
        return find_spec(HOSTS[host]) is not None
    except ModuleNotFoundError:
        return False


def texts_of(count: int, tokens: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    lengths = (max(1, min(DOCUMENT_LENGTH, log_normal(tokens, draw)) - 3) for _ in range(count))
    return [" ".join(f"w{draw.randrange(VOCABULARY)}" for _ in range(length)) for length in lengths]


def _load(host: str, folder: str, dtype: str, device: str):
    options = {"device": device, "model_kwargs": {"dtype": dtype}}
    if host == "pylate":
        from pylate import models

        return models.ColBERT(model_name_or_path=folder, document_length=DOCUMENT_LENGTH, **options)
    import sentence_transformers

    kind = sentence_transformers.MultiVectorEncoder if host == "multi_vector" else sentence_transformers.SparseEncoder
    model = kind(folder, **options)
    model.max_seq_length = DOCUMENT_LENGTH
    return model


def _encoding(model, host: str, what: str, batch: int) -> Callable[[list[str]], object]:
    options = {"batch_size": batch, "show_progress_bar": False}
    if host == "pylate":
        return lambda texts: model.encode(texts, is_query=what == "queries", **options)
    options["convert_to_numpy" if host == "multi_vector" else "save_to_cpu"] = True
    encode = model.encode_query if what == "queries" else model.encode_document
    return lambda texts: encode(texts, **options)


def measure(cell: dict) -> dict:
    import torch

    import pylate_fastmaxsim

    host, what, cuda = cell["host"], cell["what"], torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    texts = texts_of(cell["texts"], QUERY_TOKENS if what == "queries" else DOCUMENT_TOKENS, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        splade = host == "sparse"
        family = "bert" if splade else "modernbert"
        save_encoder(Path(folder), cell["layers"], family, masked_lm=splade, **sizes(cell["hidden"]))
        torch.manual_seed(0)
        exact = _load(host, folder, "float32", device)
        # A projection has random weights, so that both models have to be one.
        exact.save(f"{folder}/model")
        expected = _encoding(exact, host, what, 32)(texts[:COMPARED])
        del exact
        model = _load(host, f"{folder}/model", cell["dtype"], device)
    if cell["path"] != "stock":
        pylate_fastmaxsim.enable(compile=cell["path"] == "compiled", quiet=True)
    encode = _encoding(model, host, what, cell["batch"])
    encode(texts[:WARM_UP])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    encode(texts)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    made = {"seconds": seconds, "texts_per_second": len(texts) / seconds, "peak_gib": peak}
    if cuda:
        made["busy"] = _busy(encode, texts[:PROFILED])
    return {**made, **_distances(encode(texts[:COMPARED]), expected), "status": "ok"}


def _busy(encode: Callable, texts: list[str]) -> float:
    import torch
    from torch.profiler import ProfilerActivity, profile

    start = time.perf_counter()
    encode(texts)
    seconds = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        encode(texts)
        torch.cuda.synchronize()
    return sum(event.device_time for event in profiler.events()) / 1e6 / seconds


def _distances(made, expected) -> dict:
    import torch

    def vectors(embeddings) -> torch.Tensor:
        if isinstance(embeddings, list):
            embeddings = torch.cat([torch.as_tensor(each) for each in embeddings])
        return embeddings.to_dense().double().cpu()

    distance = 1 - torch.cosine_similarity(vectors(made), vectors(expected))
    return {"distance": distance.max().item(), "mean_distance": distance.mean().item()}


def markdown(content: dict) -> str:
    """Texts a second and peak memory of each host, and how many times stock's with the same settings."""
    cells = content["cells"]
    rows = []
    for name, cell in cells.items():
        host, what, way = name.split("/")
        stock = cells.get(f"{host}/{what}/stock {cell['dtype']} {cell['batch']}", {})
        rate, peak = cell.get("texts_per_second"), cell.get("peak_gib")
        shown = [host, what, way, f"{rate:,.0f}" if rate else cell.get("status", "")]
        gain = times(rate, stock.get("texts_per_second")) if rate and cell["path"] != "stock" else ""
        busy = f"{100 * cell['busy']:.0f}%" if cell.get("busy") else ""
        rows.append([*shown, gain, f"{peak:.2f} GiB" if peak else "", busy])
    return table(["host", "texts", "way", "texts a second", "of stock's", "memory", "GPU busy"], rows)
