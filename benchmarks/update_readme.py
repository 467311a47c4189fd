"""Write the tables of the README and of docs/ from the committed results.

python -m benchmarks.update_readme
"""

from __future__ import annotations

import itertools
import json
import re
from operator import itemgetter

from benchmarks.harness.paths import RESULTS, ROOT
from benchmarks.losses.table import markdown as losses_markdown
from benchmarks.losses.table import ring_table
from benchmarks.operators.attention import table as attention_table
from benchmarks.operators.table import readme_table
from benchmarks.quality.cranfield_table import markdown as cranfield_markdown
from benchmarks.retrieval.corpus_search import markdown as corpus_markdown
from benchmarks.training.lengths import markdown_table as lengths_table
from benchmarks.training.multi_vector_step import markdown_table as multi_vector_markdown
from benchmarks.training.page_step import markdown_table as page_table
from benchmarks.training.train_step import PATHS, cell_name, mark_of_runs, markdown_table, row_title


def results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def train_step_tables() -> str:
    cells = results("train_step")["cells"]
    tables = (markdown_table(cells, checkpointing) for checkpointing in (False, True))
    return "\n\nWith gradient checkpointing:\n\n".join(tables)


def summary_table() -> str:
    """Every workload once: stock, the faster of the two peers, this package; and the speed relative to stock."""
    step, kd, gradcache = (results(name)["cells"] for name in ("train_step", "kd_step", "gradcache_step"))
    lines = [
        "| | PyLate | PyLate with fused kernels, the faster of two | this package | speed | memory |",
        "|---" * 6 + "|",
    ]

    def add(title: str, cells: dict, batch: int, compiled: bool = False) -> None:
        stock, *peers, ours = (cells[cell_name(path, batch, compiled, False)] for path in PATHS)
        three = stock, min(peers, key=itemgetter("step_ms")), ours
        entries = [f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" for cell in three]
        mark = mark_of_runs(ours, stock)
        ratios = [f"{stock['step_ms'] / ours['step_ms']:.2f}x{mark}", f"{ours['peak_gib'] / stock['peak_gib']:.0%}"]
        lines.append("| " + " | ".join([title, *entries, *ratios]) + " |")

    add("contrastive, 256 queries, one negative each", step, 256)
    add("the same, compiled", step, 256, compiled=True)
    add("distillation, 32 queries, 16 documents each", kd, 32)
    add("GradCache (`CachedContrastive`), 4,096 queries, one negative each", gradcache, 4096)
    return "\n".join(lines)


def multi_vector_step_table() -> str:
    """Steps with all texts in one mini-batch."""
    rows = [("stock", False), ("flash", False), ("both", False), ("fast", False), ("fast", True)]
    return multi_vector_markdown(results("multi_vector_step"), rows)


def multi_vector_gradcache_table() -> str:
    """Steps of GradCache, in mini-batches of texts and of tokens."""
    rows = [("stock", False, 32), ("flash", False, 32), ("fast", False, 32), ("stock", False, 128)]
    for tokens in (9600, 19200, 38400):
        rows += [(path, compiled, 32, tokens) for path, compiled in (("flash", False), ("fast", False), ("fast", True))]
    return multi_vector_markdown(results("multi_vector_gradcache"), rows)


def two_gpus_table() -> str:
    """Steps on one GPU and on two: speed relative to stock on as many, and what of it more GPUs leave."""
    one, two = (results(name)["cells"] for name in ("step_on_one_gpu", "step_on_two_gpus"))
    lines = ["| path | 1 GPU | 2 GPUs | |", "|---" * 4 + "|"]
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
        lines.append("| " + " | ".join([row_title(path, compiled), *entries]) + " |")
    return "\n".join(lines)


def allocator_table() -> str:
    """Steps with PyTorch's allocator as it is and with segments that grow: what tensors took, and what was held."""
    trial = results("kernel_trials")["allocator"]
    lines = ["| queries | | as it is | `expandable_segments:True` |", "|---" * 4 + "|"]
    rows = {
        "median step": lambda cell: f"{cell['step_ms']:,.0f} ms",
        "in use at most": lambda cell: f"{cell['peak_gib']:.1f} GiB",
        "held at most": lambda cell: f"{cell['peak_reserved_gib']:.1f} GiB",
    }
    for batch in trial["as it is"]:
        cells = [trial[setting][batch] for setting in ("as it is", "expandable_segments")]
        for title, text in rows.items():
            first = title == "median step"
            entries = [text(cell) if cell["status"] == "ok" else cell["status"] * first for cell in cells]
            lines.append("| " + " | ".join([f"{int(batch):,}" * first, title, *entries]) + " |")
    return "\n".join(lines)


def encoders_table() -> str:
    """Steps of other encoders than ModernBERT."""
    cells = results("encoders_h100")["cells"]
    lines = ["| encoder | PyLate | this package | speed | memory |", "|---" * 5 + "|"]
    titles = {
        ("eurobert", 64): "EuroBERT-210m",
        ("qwen3", 32): "Qwen3-Embedding-0.6B, 32 queries",
        ("mpnet", 64): "MPNet-base, in groups",
    }
    for (name, batch), title in titles.items():
        stock, fast = pair = [cells[f"{name}/{path}/batch={batch}"] for path in ("stock", "fast")]
        entries = [f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" for cell in pair]
        ratios = [f"{stock['step_ms'] / fast['step_ms']:.2f}x", f"{fast['peak_gib'] / stock['peak_gib']:.0%}"]
        lines.append("| " + " | ".join([title, *entries, *ratios]) + " |")
    return "\n".join(lines)


def deepspeed_table() -> str:
    """Steps on two GPUs under DeepSpeed: speed relative to stock under the same."""
    trial = results("kernel_trials")["deepspeed"]
    columns = ["stock", "fast", "fast, compiled"]
    lines = ["| | PyLate | PyLate + pylate-fastmaxsim | the same, `compile=True` |", "|---" * 4 + "|"]
    for stage in ("ZeRO 2", "ZeRO 3"):
        cells = [trial.get(f"{stage}, {column}") for column in columns]
        entries = [
            f"{cell['step_ms']:,.0f} ms, {cell['peak_gib']:.1f} GiB" if cell else "does nothing" for cell in cells
        ]
        for place, cell in enumerate(cells[1:], 1):
            entries[place] += f" ({cells[0]['step_ms'] / cell['step_ms']:.2f}x)" if cell else ""
        lines.append("| " + " | ".join([stage, *entries]) + " |")
    return "\n".join(lines)


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
    lines = ["| | stock | fast |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]
    largest = f"at most {number(summary['largest_loss_difference'], '.1e')}"
    if (step := summary["loss_difference_nan_from"]) is not None:
        largest = f"NaN, first at step {step}"
    return "\n".join(lines) + f"\n\n{summary['speedup']:.2f} times faster; the loss curves differ by {largest}."


def number(value: float | None, pattern: str) -> str:
    """As text; the results have null for what is not finite."""
    return "NaN" if value is None else format(value, pattern)


def long_documents_table() -> str:
    lines = ["| queries | PyLate | this package | speed | memory |", "|---" * 5 + "|"]
    for batch in (16, 128):
        comparison = results(f"long_documents_{batch}")
        runs, summary = comparison["runs"], comparison["summary"]
        entries = [
            f"{run['step_seconds']:.1f} s, {run['memory']['peak'] / 2**30:.1f} GiB"
            if run["status"] == "finished"
            else run["status"]
            for run in (runs["stock"], runs["fast"])
        ]
        ratios = [f"{summary['speedup']:.2f}x", f"{summary['peak_memory']:.0%}"] if summary["speedup"] else ["", ""]
        lines.append("| " + " | ".join([str(batch), *entries, *ratios]) + " |")
    return "\n".join(lines)


def tables() -> dict[str, dict[str, str]]:
    """The tables of each document, by the name that marks their place."""
    losses = results("losses")
    return {
        "README.md": {
            "multi-vector-table": multi_vector_step_table(),
            "multi-vector-gradcache-table": multi_vector_gradcache_table(),
            "train-step-table": train_step_tables(),
            "summary-table": summary_table(),
            "lengths-table": lengths_table(results("lengths")["cells"]),
            "operators-table": readme_table(results("operators")),
            "page-step-table": page_table(results("page_step")),
        },
        "docs/measurements.md": {
            "losses-table": losses_markdown(losses, ["embedded", "ceiling"]),
            "encoders-table": encoders_table(),
            "allocator-table": allocator_table(),
            "long-documents-table": long_documents_table(),
            "corpus-search-table": corpus_markdown(results("corpus_search")),
            "quickstart-table": quickstart_table(),
            "cranfield-table": cranfield_markdown(results("cranfield")["cells"]),
        },
        "docs/encoding.md": {"attention-table": attention_table(results("attention")["rows"])},
        "docs/across_devices.md": {
            "ring-table": ring_table(losses),
            "two-gpus-table": two_gpus_table(),
            "deepspeed-table": deepspeed_table(),
        },
    }


def updated(name: str, text: str) -> str:
    """A document with its tables made anew."""
    for mark, table in tables()[name].items():
        pattern = f"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
        text, count = re.subn(pattern, lambda match, t=table: f"{match[1]}{t}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name} must have one place marked {mark}, found {count}.")
    return text


if __name__ == "__main__":
    for name in tables():
        path = ROOT / name
        path.write_text(updated(name, path.read_text(encoding="utf-8")), encoding="utf-8")
