"""The tables of the README and of docs/, made of the committed results: ``python -m benchmarks --render``."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatch
from operator import itemgetter

from benchmarks.harness.paths import RESULTS, ROOT
from benchmarks.harness.records import load
from benchmarks.harness.tables import table
from benchmarks.harness.turns import speed
from benchmarks.operators import compressed_operators
from benchmarks.operators.table import docs_table
from benchmarks.quality import compressed_fidelity, first_stage_cranfield
from benchmarks.retrieval import corpus_search, sparse_search
from benchmarks.training import ceilings, lengths, multi_vector_step, page_step, splade_step, train_step
from benchmarks.training.steps import mark_of_runs
from benchmarks.training.train_step import PATHS, cell_name, row_title
from pylate_fastmaxsim.integrations.options import OPTIONS


def results(name: str) -> dict:
    return load(RESULTS / f"{name}.json")


def summary_table() -> str:
    """Every workload once: stock, the fastest peer, this package; and speed and memory relative to stock."""
    step, kd, gradcache = (results(name)["cells"] for name in ("train_step", "kd_step", "gradcache_step"))
    lines = []

    def add(title: str, cells: dict, batch: int, compiled: bool = False) -> None:
        stock, *peers, ours = (cells[cell_name(path, batch, compiled, False)] for path in PATHS)
        lines.append(compared(title, stock, min(peers, key=itemgetter("step_ms")), ours))

    add("contrastive, 256 queries, one negative each", step, 256)
    add("the same, compiled", step, 256, compiled=True)
    add("distillation, 32 queries, 16 documents each", kd, 32)
    add("GradCache (`CachedContrastive`), 4,096 queries, one negative each", gradcache, 4096)
    multi_vector = results("multi_vector_step")["cells"]
    stock, peer, ours = (multi_vector[f"{path}/batch=64/compile=0"] for path in ("stock", "flash", "fast"))
    lines.append(compared("MultiVectorEncoder, 64 queries, one negative each (H100)", stock, peer, ours))
    splade = results("splade_step")["cells"]
    stock, ours = (splade[f"{path}/batch=128/compile=0"] for path in ("stock", "fast"))
    lines.append(compared(f"SparseEncoder (SPLADE), 128 queries, one negative each ({gpu(stock)})", stock, None, ours))
    return table(["step", "stock", "best peer", "this package", "speed", "memory"], lines)


def padding_table() -> str:
    """Speed and memory relative to stock by the share of padding."""
    cells = results("lengths")["cells"]
    shares = [f"{1 - lengths.live_share(cells, tokens):.0%}" for tokens in lengths.mean_lengths(cells)]
    rows: dict[str, list[str]] = {"speed": [], "speed, both compiled": [], "memory": []}
    for tokens, compiled in itertools.product(lengths.mean_lengths(cells), (False, True)):
        stock, fast = (cells[lengths.cell_name(path, tokens, compiled)] for path in ("stock", "fast"))
        rows["speed, both compiled" if compiled else "speed"].append(speed(fast, stock))
        if not compiled:
            rows["memory"].append(f"{fast['peak_gib'] / stock['peak_gib']:.0%}")
    return table(["padding", *shares], [[title, *entries] for title, entries in rows.items()])


def gpu(cell: dict) -> str:
    """The short name of the GPU that measured a cell."""
    return re.search(r"\b[A-Z]\d+\b|$", cell["environment"]["device"])[0] or cell["environment"]["device"]


def compared(title: str, stock: dict, peer: dict | None, ours: dict) -> list[str]:
    """A row: three steps, and speed and memory of the last relative to the first."""
    entries = [f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" if cell else "" for cell in (stock, peer, ours)]
    mark = mark_of_runs(ours, stock)
    ratios = [f"{speed(ours, stock)}{mark}", f"{ours['peak_gib'] / stock['peak_gib']:.0%}"]
    return [title, *entries, *ratios]


def multi_vector_step_table() -> str:
    """Steps with all texts in one mini-batch."""
    rows = [("stock", False), ("flash", False), ("both", False), ("fast", False), ("fast", True)]
    return multi_vector_step.markdown_table(results("multi_vector_step")["cells"], rows)


def two_gpus_table() -> str:
    """Steps on one GPU and on two: speed relative to stock on as many, and what of it more GPUs leave."""
    one, two = (results(name)["cells"] for name in ("step_on_one_gpu", "step_on_two_gpus"))
    lines = []
    for compiled, path in itertools.product([False, True], PATHS):
        name, stock = cell_name(path, 128, compiled, False), cell_name("stock", 128, False, False)
        if name not in two:
            continue
        entries = []
        for cells in (one, two):
            text = f"{cells[name]['step_ms']:,.0f} ms, {cells[name]['peak_gib']:.1f} GiB"
            speed = f" ({cells[stock]['step_ms'] / cells[name]['step_ms']:.2f}x)"
            entries.append(text + ("" if name == stock else speed))
        entries.append(f"{one[name]['step_ms'] / two[name]['step_ms']:.0%}")
        lines.append([row_title(path, compiled), *entries])
    return table(["path", "1 GPU", "2 GPUs", ""], lines)


def encoders_table() -> str:
    """Steps of other encoders than ModernBERT."""
    cells = results("encoders_h100")["cells"]
    lines = []
    titles = {
        ("eurobert", 64): "EuroBERT-210m",
        ("qwen3", 32): "Qwen3-Embedding-0.6B, 32 queries",
        ("mpnet", 64): "MPNet-base, in groups",
    }
    for (name, batch), title in titles.items():
        stock, fast = pair = [cells[f"{name}/{path}/batch={batch}"] for path in ("stock", "fast")]
        entries = [f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" for cell in pair]
        ratios = [speed(fast, stock), f"{fast['peak_gib'] / stock['peak_gib']:.0%}"]
        lines.append([title, *entries, *ratios])
    return table(["encoder", "PyLate", "this package", "speed", "memory"], lines)


def deepspeed_table() -> str:
    """Steps on two GPUs under DeepSpeed: speed relative to stock under the same."""
    trial = results("kernel_trials")["deepspeed"]
    columns = ["stock", "fast", "fast, compiled"]
    lines = []
    for stage in ("ZeRO 2", "ZeRO 3"):
        cells = [trial.get(f"{stage}, {column}") for column in columns]
        entries = [
            f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" if cell else "does nothing" for cell in cells
        ]
        for place, cell in enumerate(cells[1:], 1):
            entries[place] += f" ({cells[0]['step_ms'] / cell['step_ms']:.2f}x)" if cell else ""
        lines.append([stage, *entries])
    return table(["", "PyLate", "PyLate + pylate-fastmaxsim", "the same, `compile=True`"], lines)


def quickstart_table() -> str:
    result = results("quickstart")
    stock, fast, summary = result["runs"]["stock"], result["runs"]["fast"], result["summary"]
    rows = [
        ("median step", *(f"{run['step_seconds'] * 1e3:.0f} ms" for run in (stock, fast))),
        ("peak memory", *(f"{run['memory']['peak'] / 2**20:.0f} MiB" for run in (stock, fast))),
        ("live document tokens per second", *(f"{run['live_tokens_per_second']:,.0f}" for run in (stock, fast))),
        ("padding in documents encoded", *(f"{run['padding']:.0%}" for run in (stock, fast))),
        ("last loss", *(number(run["losses"][-1], ".4f") for run in (stock, fast))),
        ("nDCG@10", *(f"{run['ndcg@10']:.3f}" for run in (stock, fast))),
    ]
    largest = f"at most {number(summary['largest_loss_difference'], '.1e')}"
    if (step := summary["loss_difference_nan_from"]) is not None:
        largest = f"NaN, first at step {step}"
    return (
        table(["", "stock", "fast"], rows)
        + f"\n\n{summary['speedup']:.2f} times faster; the loss curves differ by {largest}."
    )


def options_table() -> str:
    """The options of ``enable()``."""
    rows = []
    for option in OPTIONS:
        hosts = ", ".join(option.metadata["hosts"])
        rows.append([f"`{option.name}`", f"`{option.default}`", hosts, option.metadata["meaning"]])
    return table(["option of `enable()`", "default", "of", "meaning"], rows)


def number(value: float | None, pattern: str) -> str:
    """As text; the results have null for what is not finite."""
    return "NaN" if value is None else format(value, pattern)


def parts(text: str, *places: int) -> str:
    """Some of the titles and tables that a suite prints, by their places."""
    blocks = text.split("\n\n")
    return "\n\n".join(blocks[place] for place in places)


def cells_of(name: str, *patterns: str) -> dict:
    """The results of a suite with some of its cells only."""
    content = results(name)
    chosen = {cell: row for cell, row in content["cells"].items() if any(fnmatch(cell, each) for each in patterns)}
    return content | {"cells": chosen}


def tables() -> dict[str, dict[str, str]]:
    """The tables of each document, by the name that marks their place."""
    compressed = cells_of("compressed_operators", "256x32.512x300/*")
    compared_steps = cells_of("train_step", "*/compile=0/*", "stock/*", "fast/*")["cells"]
    first_stage = cells_of(
        "first_stage_cranfield", "BM25", "static, 0.6", "static, IDF, 0.6", "static, BM25's weights, 0.6"
    )
    return {
        "README.md": {
            "summary-table": summary_table(),
            "padding-table": padding_table(),
            "options-table": options_table(),
        },
        "docs/sentence_transformers.md": {
            "multi-vector-table": multi_vector_step_table(),
        },
        "docs/benchmarks.md": {
            "train-step-table": train_step.markdown_table(compared_steps, False),
            "encoders-table": encoders_table(),
            "splade-step-table": splade_step.markdown(results("splade_step")),
            "page-step-table": page_step.markdown(results("page_step")),
            "operators-table": docs_table(
                cells_of(
                    "operators",
                    "host",
                    "in-batch-[23]/*",
                    "colpali*",
                    "kd/*",
                    "rerank-10000/*",
                    "ragged/*",
                    "ragged-4096/*",
                    "fp32*",
                )
            ),
            "losses-table": ceilings.markdown(results("ceilings")),
            "corpus-search-table": corpus_search.markdown(
                cells_of("corpus_search", "*/write", "*/read", "*/streamed", "stock*")
            ),
            "quickstart-table": quickstart_table(),
        },
        "docs/distributed.md": {
            "two-gpus-table": two_gpus_table(),
            "deepspeed-table": deepspeed_table(),
        },
        "docs/corpora.md": {
            "compressed-operators-table": compressed_operators.docs_table(compressed),
            "compressed-fidelity-table": parts(compressed_fidelity.markdown(results("compressed_fidelity")), 1),
        },
        "docs/sparse.md": {
            "sparse-search-table": parts(sparse_search.markdown(results("sparse_search")), 0, 1),
        },
        "docs/recipes.md": {"first-stage-table": first_stage_cranfield.markdown(first_stage)},
    }


def updated(name: str, text: str) -> str:
    """A document with its tables made anew."""
    for mark, made in tables()[name].items():
        pattern = f"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        text, count = re.subn(pattern, lambda match, t=made: f"{match[1]}{t}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name} must have one place marked {mark}, found {count}.")
    return text


def render() -> None:
    """Write all tables into their documents."""
    for name in tables():
        path = ROOT / name
        path.write_text(updated(name, path.read_text(encoding="utf-8")), encoding="utf-8")
