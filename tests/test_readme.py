"""The README: its tables are those of the committed results, and its operator example runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_made_from_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "update_readme", raising=False)
    from update_readme import updated

    assert updated(README) == README, "run: python benchmarks/update_readme.py"


def test_the_operator_example_runs():
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "maxsim(" in code]
    assert len(examples) == 1
    names: dict = {}
    exec(examples[0], names)
    assert names["scores"].shape == (4, 3) and names["pairs"].shape == (4, 1)


def test_links_lead_somewhere():
    headings = {"#" + title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)}
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert target in headings or (ROOT / target).exists(), target
