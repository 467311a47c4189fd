"""``encode`` of the hosts, stock and with the flag: texts a second, peak memory, and distance from float32.

    python -m benchmarks encode                                    # of the hosts that are installed
    python -m benchmarks encode --only 'pylate/*' --texts 20000    # some cells
    python -m benchmarks encode --texts 200 --layers 2 --hidden 64   # a trial, also on a CPU

ModernBERT-base in random weights for late interaction, BERT-base for SPLADE, with a bias that leaves one weight in a
hundred above 0, as of a trained model. Documents of random words have 80 tokens on average and at most 300, queries 8.
Results come to the host as stock gives them: arrays of PyLate, tensors of a MultiVectorEncoder (convert_to_numpy=True) and
of a SparseEncoder (save_to_cpu=True). The cells of a host and kind of text share a process; the clock runs over one call
for all texts, after one for 512, and with compiled layers another for all. Stock, and SPLADE, encode fewer texts, since
their rate does not depend on the number.
``distance`` is the largest of 1 - cosine of a token's (SPLADE: a text's) vector and that of stock in float32, over 256
texts; ``mean_distance`` the mean. ``pooled`` documents have one vector for two tokens.

``evaluator`` is the host's information retrieval evaluator with 500 queries and 5,000 documents, of a model that
accelerate has prepared for training in bf16. ``corpus`` is a million documents encoded and written as int8, beside 100,000
that are encoded and dropped.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import random
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

import pylate_fastmaxsim
from benchmarks.harness.lengths import log_normal
from benchmarks.harness.tables import table, times
from benchmarks.harness.timing import DEVICE, peaks_gib, seconds_of
from benchmarks.training.encoder import DOCUMENT_LENGTH, save_encoder, words

TIMEOUT = 300
PROCESS_OF = ("host", "what")
HOSTS = {
    "pylate": "pylate",
    "multi_vector": "sentence_transformers.multi_vector_encoder",
    "sparse": "sentence_transformers",
}
# What encodes, in which dtype, and batch_size.
WAYS = ("stock float32 32", "stock bfloat16 32", "stock bfloat16 256", "fast float32 32", "fast bfloat16 32")
WAYS += ("fast bfloat16 256", "pooled bfloat16 256", "compiled bfloat16 256")
QUERY_TOKENS, DOCUMENT_TOKENS = 8, 80
WARM_UP, COMPARED, FEWER = 512, 256, 4000
EVALUATED, ALONE = (500, 5000), 100_000  # queries and documents; documents that are encoded and dropped


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--passages", type=int, default=1_000_000, help="documents of a corpus")
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--hidden", type=int, help="a smaller encoder, for a trial: a multiple of 64")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    hosts = [host for host, module in HOSTS.items() if find_spec(module) is not None]
    for host, what, way in itertools.product(hosts, ("documents", "queries", "evaluator", "corpus"), WAYS):
        path, dtype, batch = way.split()
        wanted = {
            "documents": path != "pooled" or host != "sparse",
            "queries": batch == "256" and path not in ("pooled", "compiled") and host != "sparse",
            "evaluator": way in ("stock float32 32", "fast float32 32") and host != "sparse",
            "corpus": path == "compiled" and host == "pylate",
        }
        if wanted[what]:
            texts = min(FEWER, options.texts) if path == "stock" or host == "sparse" else options.texts
            texts = options.passages if what == "corpus" else texts
            size = {"texts": texts, "layers": options.layers, "hidden": options.hidden}
            cell = {"host": host, "what": what, "path": path, "dtype": dtype, "batch": int(batch)}
            made[f"{host}/{what}/{way}"] = cell | size
    return made


def texts_of(count: int, tokens: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [words(min(DOCUMENT_LENGTH, log_normal(tokens, draw)) - 3, draw) for _ in range(count)]


def _load(host: str, folder: str, dtype: str, device: str = DEVICE.type):
    options = {"device": device, "model_kwargs": {"dtype": dtype}}
    if host == "pylate":
        from pylate import models

        return models.ColBERT(model_name_or_path=folder, document_length=DOCUMENT_LENGTH, **options)
    import sentence_transformers

    kind = sentence_transformers.MultiVectorEncoder if host == "multi_vector" else sentence_transformers.SparseEncoder
    model = kind(folder, **options)
    model.max_seq_length = DOCUMENT_LENGTH
    return model


def _encoding(model, host: str, what: str, batch: int, pooled: bool = False) -> Callable[[list[str]], object]:
    options = {"batch_size": batch, "show_progress_bar": False}
    if pooled and host == "multi_vector":
        from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

        options["token_pooling"] = HierarchicalTokenPooling(2)
    if host == "pylate":
        options["pool_factor"] = 1 + pooled
        return lambda texts: model.encode(texts, is_query=what == "queries", **options)
    options["convert_to_numpy" if host == "multi_vector" else "save_to_cpu"] = True
    encode = model.encode_query if what == "queries" else model.encode_document
    return lambda texts: encode(texts, **options)


@functools.cache
def _saved(host: str, layers: int | None, hidden: int | None) -> tempfile.TemporaryDirectory:
    """A model in random weights, of which the projection too is saved: all cells load the same."""
    folder = tempfile.TemporaryDirectory()
    splade = host == "sparse"
    save_encoder(Path(folder.name), layers, "bert" if splade else "modernbert", masked_lm=splade, hidden=hidden)
    torch.manual_seed(0)
    model = _load(host, folder.name, "float32", "cpu")
    if splade:
        # Random weights leave half of the vocabulary above 0, a trained model one word in a hundred.
        weights = model.encode(texts_of(16, DOCUMENT_TOKENS, seed=1), convert_to_sparse_tensor=False)
        with torch.no_grad():
            model[0].auto_model.get_output_embeddings().bias -= weights[:, ::10].expm1().quantile(0.99)
    model.save(f"{folder.name}/model")
    return folder


@functools.cache
def _expected(host: str, what: str, folder: str) -> object:
    texts = texts_of(COMPARED, QUERY_TOKENS if what == "queries" else DOCUMENT_TOKENS, seed=0)
    return _encoding(_load(host, folder, "float32"), host, what, 32)(texts)


def measure(cell: dict) -> dict:
    host, what = cell["host"], cell["what"]
    gc.collect()  # the model of the cell before
    folder = f"{_saved(host, cell['layers'], cell['hidden']).name}/model"
    pylate_fastmaxsim.disable()
    if what in ("documents", "queries"):
        _expected(host, what, folder)
    model = _load(host, folder, cell["dtype"])
    if cell["path"] != "stock":
        pylate_fastmaxsim.enable(compile=cell["path"] == "compiled", quiet=True)
    measured = {"evaluator": _evaluator, "corpus": _corpus}.get(what, _texts)
    return {**measured(model, cell, folder), "status": "ok"}


def _texts(model, cell: dict, folder: str) -> dict:
    host, what = cell["host"], cell["what"]
    texts = texts_of(max(cell["texts"], COMPARED), QUERY_TOKENS if what == "queries" else DOCUMENT_TOKENS, seed=0)
    encode = _encoding(model, host, what, cell["batch"], cell["path"] == "pooled")
    encode(texts[:WARM_UP])
    if cell["path"] == "compiled":
        encode(texts)  # sizes that are compiled for
    seconds = _seconds(lambda: encode(texts))
    peak = peaks_gib()[0] if DEVICE.type == "cuda" else None
    made = {"seconds": seconds, "texts_per_second": len(texts) / seconds, "peak_gib": peak}
    if cell["path"] == "pooled":
        return made
    return made | _distances(encode(texts[:COMPARED]), _expected(host, what, folder))


def _evaluator(model, cell: dict, folder: str) -> dict:
    from accelerate import Accelerator

    if cell["host"] == "pylate":
        from pylate.evaluation import PyLateInformationRetrievalEvaluator as Evaluator
    else:
        from sentence_transformers.multi_vector_encoder.evaluation import (
            MultiVectorInformationRetrievalEvaluator as Evaluator,
        )
    queries, documents = (min(count, cell["texts"]) for count in EVALUATED)
    corpus = dict(enumerate(texts_of(documents, DOCUMENT_TOKENS, seed=0)))
    # Each has words of a document.
    asked = {n: " ".join(corpus[n].split()[:QUERY_TOKENS]) for n in range(queries)}
    evaluate = Evaluator(asked, corpus, {n: {n} for n in asked}, batch_size=cell["batch"], write_csv=False)
    model = Accelerator(mixed_precision="bf16", cpu=DEVICE.type == "cpu").prepare_model(model)
    evaluate(model)
    found: dict[str, float] = {}
    seconds = _seconds(lambda: found.update(evaluate(model)))
    made = {"seconds": seconds, "texts_per_second": documents / seconds}
    return made | {"metrics": {name: value for name, value in found.items() if "ndcg" in name}}


def _corpus(model, cell: dict, folder: str) -> dict:
    from datasets import Dataset

    from pylate_fastmaxsim.recipes.evaluation.ranking import encode_corpus
    from pylate_fastmaxsim.recipes.models.retriever import retriever_of
    from pylate_fastmaxsim.retrieval.corpus import write_corpus

    some = texts_of(min(FEWER * 5, cell["texts"]), DOCUMENT_TOKENS, seed=0)
    texts = [some[n % len(some)] for n in range(cell["texts"])]
    rows = Dataset.from_dict({"_id": [str(n) for n in range(len(texts))], "text": texts})

    def encoded(begin: int, end: int = len(texts)):
        return encode_corpus(retriever_of(model), rows.select(range(begin, end)), cell["batch"])

    alone = min(ALONE, len(texts))
    for _ in encoded(0, len(some)):
        pass
    each = _seconds(lambda: all(len(batch) for batch in encoded(0, alone))) / alone
    seconds = _seconds(lambda: write_corpus(f"{folder}-{cell['path']}", encoded, format="int8"))
    made = {"seconds": seconds, "texts_per_second": len(texts) / seconds, "encoded_per_second": 1 / each}
    return made | {"times_encoding": seconds / len(texts) / each}


def _seconds(call: Callable[[], object]) -> float:
    return seconds_of(call)[0]["seconds"]


def _distances(made, expected) -> dict:
    def vectors(embeddings) -> torch.Tensor:
        if isinstance(embeddings, list):
            embeddings = torch.cat([torch.as_tensor(each) for each in embeddings])
        return embeddings.to_dense().double().cpu()

    distance = 1 - torch.cosine_similarity(vectors(made), vectors(expected))
    return {"distance": distance.max().item(), "mean_distance": distance.mean().item()}


def markdown(content: dict) -> str:
    """Texts a second, how many times stock's at its defaults and with the same settings, and peak memory."""
    cells = content["cells"]
    rows = []
    for name, cell in cells.items():
        host, what, way = name.split("/")
        rate, peak = cell.get("texts_per_second"), cell.get("peak_gib")
        stocks = (f"{host}/{what}/stock {which}" for which in ("float32 32", f"{cell['dtype']} {cell['batch']}"))
        gains = [times(rate, cells[stock]["texts_per_second"]) if rate and stock in cells else "" for stock in stocks]
        shown = [host, what, way, f"{rate:,.0f}" if rate else cell.get("status", ""), *gains]
        rows.append([*shown, f"{peak:.2f} GiB" if peak else ""])
    head = ["host", "texts", "way", "texts a second", "of stock's default", "of stock's", "memory"]
    return table(head, rows)
