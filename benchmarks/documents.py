"""The tables of the README and of docs/, made of the committed results: ``python -m benchmarks --render``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from operator import itemgetter

from benchmarks.harness.paths import RESULTS, ROOT
from benchmarks.harness.records import load
from benchmarks.harness.suite import suite_named
from benchmarks.harness.tables import replace_marked, table, times
from benchmarks.harness.turns import speed
from benchmarks.training import lengths, multi_vector_step, train_step
from benchmarks.training.steps import entry, mark_of_runs, time_and_memory
from benchmarks.training.train_step import PATHS, cell_name, row_title
from pylate_fastmaxsim.integrations.options import OPTIONS


def results(name: str) -> dict:
    return load(RESULTS / f"{name}.json")


def compared(title: str, stock: dict, peer: dict | None, ours: dict) -> list[str]:
    """A row: three steps, and speed and memory of the last relative to the first."""
    ratios = [speed(ours, stock) + mark_of_runs(ours, stock), f"{ours['peak_gib'] / stock['peak_gib']:.0%}"]
    return [title, *(time_and_memory(cell) if cell else "" for cell in (stock, peer, ours)), *ratios]


def against_peers(title: str, cells: Mapping[str, dict], batch: int, compiled: bool = False) -> list[str]:
    """A row of :func:`compared` with the fastest peer of the same batch."""
    stock, *peers, ours = (cells[cell_name(path, batch, compiled, False)] for path in PATHS)
    return compared(title, stock, min(peers, key=itemgetter("step_ms")), ours)


def summary_table() -> str:
    """Every workload once: stock, the fastest peer, this package; and speed and memory relative to stock."""
    step, vectors, splade = (results(name)["cells"] for name in ("train_step", "multi_vector_step", "splade_step"))
    stock, fast = (splade[f"{path}/batch=128/compile=0"] for path in ("stock", "fast"))
    gpu = re.search(r"\b[A-Z]\d+\b|$", stock["environment"]["device"])[0]
    multi_vector = [vectors[f"{path}/batch=64/compile=0"] for path in ("stock", "flash", "fast")]
    gradcache = "GradCache (`CachedContrastive`), 4,096 queries, one negative each"
    lines = [
        against_peers("contrastive, 256 queries, one negative each", step, 256),
        against_peers("the same, compiled", step, 256, compiled=True),
        against_peers("distillation, 32 queries, 16 documents each", results("kd_step")["cells"], 32),
        against_peers(gradcache, results("gradcache_step")["cells"], 4096),
        compared("MultiVectorEncoder, 64 queries, one negative each (H100)", *multi_vector),
        compared(f"SparseEncoder (SPLADE), 128 queries, one negative each ({gpu})", stock, None, fast),
    ]
    return table(["step", "stock", "best peer", "this package", "speed", "memory"], lines)


def encode_table() -> str:
    """Documents a second of ``encode``: stock at its defaults, stock and this package in bf16 with 256 a batch."""
    cells, lines = results("encode")["cells"], []
    for host, title in (("pylate", "PyLate"), ("multi_vector", "MultiVectorEncoder"), ("sparse", "SparseEncoder")):
        ways = ("stock float32 32", "stock bfloat16 256", "fast bfloat16 256")
        found = [cells[f"{host}/documents/{way}"] for way in ways]
        default, stock, ours = (each["texts_per_second"] for each in found)
        memory = f"{found[2]['peak_gib'] / found[1]['peak_gib']:.0%}"
        rates = (f"{rate:,.0f}" for rate in (default, stock, ours))
        lines.append([title, *rates, f"{times(ours, stock)} ({times(ours, default)})", memory])
    head = ["documents a second", "stock, its defaults", "stock", "this package", "speed (of the defaults)", "memory"]
    return table(head, lines)


def padding_table() -> str:
    """Speed and memory relative to stock by the share of padding."""
    cells = results("lengths")["cells"]
    rows: dict[str, list[str]] = {"padding": [], "speed": [], "speed, both compiled": [], "memory": []}
    for tokens in lengths.mean_lengths(cells):
        rows["padding"].append(f"{1 - lengths.live_share(cells, tokens):.0%}")
        for compiled in (False, True):
            stock, fast = (cells[lengths.cell_name(path, tokens, compiled)] for path in ("stock", "fast"))
            rows["speed, both compiled" if compiled else "speed"].append(speed(fast, stock))
            if not compiled:
                rows["memory"].append(f"{fast['peak_gib'] / stock['peak_gib']:.0%}")
    header, *lines = ([title, *entries] for title, entries in rows.items())
    return table(header, lines)


def multi_vector_step_table() -> str:
    """Steps with all texts in one mini-batch."""
    rows = [("stock", False), ("flash", False), ("both", False), ("fast", False), ("fast", True)]
    return multi_vector_step.markdown_table(results("multi_vector_step")["cells"], rows)


def two_gpus_table() -> str:
    """Steps on one GPU and on two: speed relative to stock on as many, and what of it more GPUs leave."""
    runs = [results(name)["cells"] for name in ("step_on_one_gpu", "step_on_two_gpus")]
    lines = []
    for compiled, path in itertools.product([False, True], PATHS):
        name, stock = cell_name(path, 128, compiled, False), cell_name("stock", 128, False, False)
        if name in runs[1]:
            left = runs[0][name]["step_ms"] / runs[1][name]["step_ms"]
            entries = (entry(cells[name], cells[stock]) for cells in runs)
            lines.append([row_title(path, compiled), *entries, f"{left:.0%}"])
    return table(["path", "1 GPU", "2 GPUs", ""], lines)


def deepspeed_table() -> str:
    """Steps on two GPUs under DeepSpeed: speed relative to stock under the same."""
    trial = results("kernel_trials")["deepspeed"]
    lines = []
    for stage in ("ZeRO 2", "ZeRO 3"):
        cells = [trial.get(f"{stage}, {column}") for column in ("stock", "fast", "fast, compiled")]
        lines.append([stage, *(entry(cell, cells[0]) or "does nothing" for cell in cells)])
    return table(["", "PyLate", "PyLate + pylate-fastmaxsim", "the same, `compile=True`"], lines)


def encoders_table() -> str:
    """Steps of other encoders than ModernBERT."""
    cells = results("encoders_h100")["cells"]
    titles = {
        ("eurobert", 64): "EuroBERT-210m",
        ("qwen3", 32): "Qwen3-Embedding-0.6B, 32 queries",
        ("mpnet", 64): "MPNet-base, in groups",
    }
    lines = []
    for (name, batch), title in titles.items():
        stock, fast = (cells[f"{name}/{path}/batch={batch}"] for path in ("stock", "fast"))
        name, stock_step, _, *rest = compared(title, stock, None, fast)
        lines.append([name, stock_step, *rest])
    return table(["encoder", "PyLate", "this package", "speed", "memory"], lines)


def quickstart_table() -> str:
    result = results("quickstart")
    runs, summary = [result["runs"]["stock"], result["runs"]["fast"]], result["summary"]
    rows = {
        "median step": lambda run: f"{run['step_seconds'] * 1e3:.0f} ms",
        "peak memory": lambda run: f"{run['memory']['peak'] / 2**20:.0f} MiB",
        "live document tokens per second": lambda run: f"{run['live_tokens_per_second']:,.0f}",
        "padding in documents encoded": lambda run: f"{run['padding']:.0%}",
        # The results have null for what is not finite.
        "last loss": lambda run: "NaN" if run["losses"][-1] is None else f"{run['losses'][-1]:.4f}",
        "nDCG@10": lambda run: f"{run['ndcg@10']:.3f}",
    }
    step, largest = summary["loss_difference_nan_from"], summary["largest_loss_difference"]
    differ = f"at most {largest:.1e}" if step is None else f"NaN, first at step {step}"
    lines = table(["", "stock", "fast"], [[title, *map(entry, runs)] for title, entry in rows.items()])
    return f"{lines}\n\n{summary['speedup']:.2f} times faster; the loss curves differ by {differ}."


def options_table() -> str:
    """The options of ``enable()``."""
    rows = []
    for option in OPTIONS:
        hosts = ", ".join(option.metadata["hosts"])
        rows.append([f"`{option.name}`", f"`{option.default}`", hosts, option.metadata["meaning"]])
    return table(["option of `enable()`", "default", "of", "meaning"], rows)


def cells_of(name: str, *patterns: str) -> dict:
    """The results of a suite with some of its cells only."""
    content = results(name)
    chosen = {cell: row for cell, row in content["cells"].items() if any(fnmatch(cell, each) for each in patterns)}
    return content | {"cells": chosen}


# Tables that suites print, by document and mark: the suite, and patterns of the cells that are shown.
SUITE_TABLES = {
    "docs/benchmarks.md": {
        "splade-step-table": ("splade_step", "*"),
        "page-step-table": ("page_step", "*"),
        "operators-table": (
            "operators",
            *("host", "in-batch-[23]/*", "colpali*", "kd/*", "rerank-10000/*", "ragged/*", "ragged-4096/*", "fp32*"),
        ),
        "losses-table": ("ceilings", "*/layers=None/*"),
        "corpus-search-table": ("corpus_search", "*/write", "*/streamed", "stock*"),
        "token-pooling-table": ("token_pooling", "*"),
        "exact-search-table": ("exact_search", "fiqa/*[!2]", "quora/[bif]*", "million/[bif]*", "marco/*"),
    },
    "docs/corpora.md": {
        "compressed-operators-table": ("compressed_operators", "256x32.512x300/*"),
        "compressed-fidelity-table": ("compressed_fidelity", "cranfield/*"),
    },
    "docs/losses.md": {"pooled-cranfield-table": ("pooled_cranfield", "*")},
    "docs/sparse.md": {
        "sparse-search-table": ("sparse_search", "*"),
        "hosted-table": ("static_cranfield", "as made", "trained*"),
    },
    "docs/recipes.md": {
        "first-stage-table": (
            "first_stage_cranfield",
            *("BM25", "static, 0.6", "static, IDF, 0.6", "static, BM25's weights, 0.6"),
        ),
    },
}


def tables() -> dict[str, dict[str, str]]:
    """The tables of each document, by the name that marks their place."""
    steps = cells_of("train_step", "*/compile=0/*", "stock/*", "fast/*")["cells"]
    made = {
        "README.md": {
            "summary-table": summary_table(),
            "padding-table": padding_table(),
            "encode-table": encode_table(),
            "options-table": options_table(),
        },
        "docs/sentence_transformers.md": {"multi-vector-table": multi_vector_step_table()},
        "docs/benchmarks.md": {
            "train-step-table": train_step.markdown_table(steps, False),
            "encoders-table": encoders_table(),
            "quickstart-table": quickstart_table(),
        },
        "docs/distributed.md": {"two-gpus-table": two_gpus_table(), "deepspeed-table": deepspeed_table()},
    }
    for document, marks in SUITE_TABLES.items():
        for mark, (name, *patterns) in marks.items():
            made.setdefault(document, {})[mark] = suite_named(name).markdown(cells_of(name, *patterns))
    return made


def render() -> None:
    """Write all tables into their documents."""
    for name, made in tables().items():
        path = ROOT / name
        path.write_text(replace_marked(name, path.read_text(encoding="utf-8"), made), encoding="utf-8")
