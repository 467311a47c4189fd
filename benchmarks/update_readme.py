"""Write the tables of the README from the committed results.

python benchmarks/update_readme.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from corpus_search import markdown as corpus_markdown
from cranfield_table import markdown as cranfield_markdown
from losses_table import markdown as losses_markdown
from operators_table import readme_table
from page_step import markdown_table as page_table
from train_step import markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def train_step_tables() -> str:
    cells = results("train_step")["cells"]
    tables = (markdown_table(cells, checkpointing) for checkpointing in (False, True))
    return "\n\nWith gradient checkpointing:\n\n".join(tables)


def quickstart_table() -> str:
    result = results("quickstart")
    stock, fast, summary = result["runs"]["stock"], result["runs"]["fast"], result["summary"]
    rows = [
        ("median step", *(f"{run['step_seconds'] * 1e3:.0f} ms" for run in (stock, fast))),
        ("peak memory", *(f"{run['memory']['peak'] / 2**20:.0f} MiB" for run in (stock, fast))),
        ("live document tokens per second", *(f"{run['live_tokens_per_second']:,.0f}" for run in (stock, fast))),
        ("padding in what the encoder computed", *(f"{run['padding']:.0%}" for run in (stock, fast))),
        ("last loss", *(f"{run['losses'][-1]:.4f}" for run in (stock, fast))),
        ("nDCG@10", *(f"{run['ndcg@10']:.3f}" for run in (stock, fast))),
    ]
    lines = ["| | stock | fast |", "|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + (
        f"\n\n{summary['speedup']:.2f} times faster; the loss curves differ by at most "
        f"{summary['largest_loss_difference']:.1e}."
    )


def updated(readme: str) -> str:
    """The README with its tables made anew."""
    tables = {
        "train-step-table": train_step_tables(),
        "kd-step-table": markdown_table(results("kd_step")["cells"], checkpointing=False),
        "gradcache-step-table": markdown_table(results("gradcache_step")["cells"], checkpointing=False),
        "operators-table": readme_table(results("operators")),
        "losses-table": losses_markdown(results("losses")),
        "corpus-search-table": corpus_markdown(results("corpus_search")),
        "quickstart-table": quickstart_table(),
        "cranfield-table": cranfield_markdown(results("cranfield")["cells"]),
        "page-step-table": page_table(results("page_step")),
    }
    for name, table in tables.items():
        pattern = f"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        readme, count = re.subn(pattern, lambda match, t=table: f"{match[1]}{t}\n{match[2]}", readme, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md must have one place marked {name}, found {count}.")
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
