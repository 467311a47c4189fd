"""The pages of documentation, and their examples: blocks of code below ``<!-- example: NAME -->``, which tests run."""

import re
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from tests.support.paths import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


def example(name: str, replaced: Mapping[str, str] | None = None) -> str:
    """The code of an example, with what is ``replaced``, as the names of models by folders; all of that must be in it."""
    found = [
        code
        for text in PAGES.values()
        for code in re.findall(rf"<!-- example: {re.escape(name)} -->\n```\w+\n(.*?)```", text, flags=re.DOTALL)
    ]
    assert len(found) == 1, f"{len(found)} examples are named {name}"
    [code] = found
    for here, there in (replaced or {}).items():
        assert here in code, here
        code = code.replace(here, there)
    return code


def run_example(name: str, replaced: Mapping[str, str] | None = None) -> SimpleNamespace:
    """The names of an example that was run."""
    names: dict = {}
    exec(example(name, replaced), names)
    return SimpleNamespace(**names)


def script_of(name: str, replaced: Mapping[str, str] | None = None) -> str:
    """The code of examples/NAME.py with few rows, to be run anywhere, and with what is ``replaced``."""
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    for here, there in ({"rows(500": "rows(20"} | dict(replaced or {})).items():
        assert here in code, here
        code = code.replace(here, there)
    return f"import sys\n\nsys.path.insert(0, {str(ROOT / 'examples')!r})\n{code}"


def run_script(name: str, capsys: pytest.CaptureFixture) -> None:
    """Run examples/NAME.py, and check that it prints two times, and the losses or documents of stock."""
    exec(script_of(name), {})
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r", loss ([\d.]+)", printed)]
    assert printed.count(" ms") == 2 and (losses or "the same documents: True" in printed)
    # On a GPU stock rounds scores to bfloat16.
    assert losses[1:] == pytest.approx(losses[:1], rel=0.1 if torch.cuda.is_available() else 1e-4)
